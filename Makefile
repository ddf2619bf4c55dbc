# What one types here; `make help` lists it. Set-up is part of every target that needs it.
#
# How a build reaches Python: `make setup` installs the package into .venv as a pointer to python/,
# so edited .py files are live. `make build` compiles in build/dev and installs what it made
# (_C, lib/, include/, _build.py: all git-ignored) into python/tenure, laid out as in the wheel.

# PYTHON  the Python that .venv is made with
# TORCH   a torch version for .venv, or "system": the torch that PYTHON already has.
#         A choice lasts until another is made.
# SECONDS for how long each fuzzer runs
PYTHON ?=
TORCH ?=
SECONDS ?= 60
JOBS ?= $(shell nproc)

BIN := .venv/bin
STAMP := .venv/setup.stamp
# A CMake and a Ninja in .venv come before those of the machine.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup build build-tests run test test-integrations soak fuzz lint format bench asan tsan wheel clean FORCE

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 19

setup: $(STAMP) build ## make .venv, install all that is needed, build; TORCH=system uses PYTHON's torch

# Runs always, and touches its stamp only when it had something to do.
$(STAMP): FORCE
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' scripts/setup

build/%/build.ninja: $(STAMP)
	@rm -f build/$*/CMakeCache.txt # not --fresh, which would throw away the objects too
	cmake --preset $*

build: build/dev/build.ninja ## compile, and put the result where `import tenure` finds it
	@flock build/dev sh -ec 'cmake --build build/dev -j $(JOBS) -t tenure _C; \
	  rm -rf python/tenure/include; cmake --install build/dev --prefix python/tenure >/dev/null'

build-tests: build ## compile the C++ tests and benchmarks, too
	@flock build/dev cmake --build build/dev -j $(JOBS)

run: build ## train a small GPT-2 on two ranks: pipeline, sharding, and who held its memory
	@$(BIN)/tenure train --ranks 2 --pp 2 --zero 3 --out build/run.tenure --overwrite

test: build-tests ## all tests: C++ (TSan's too) and Python
	ctest --test-dir build/dev --output-on-failure -j $(JOBS)
	@JOBS='$(JOBS)' scripts/test-python

test-integrations: build ## tests beside TRL with all that it brings, in an environment of its own
	@scripts/test-integrations

soak: build ## what `make test` does in short, at full length
	TENURE_HEALTHY_RUNS=200 TENURE_STORE_STEPS=500 TENURE_ATTACH_TIMES=100 TENURE_GRAPH_BLOCKS=32 \
	  TENURE_PIPELINE_STEPS=30 $(BIN)/python -m pytest tests/python/inspect/test_many.py \
	  tests/python/inspect/test_attach.py tests/python/pipelining/test_training.py \
	  tests/python/sharding/test_checker.py tests/python/store/test_seed_000.py

fuzz: ## look for inputs that the store's parsers or a live server take wrongly; SECONDS=60 for each
	@scripts/fuzz $(SECONDS)

lint: build ## clang-format, clang-tidy, ruff, mypy
	@scripts/lint

format: $(STAMP) ## format C++ and Python
	@scripts/lint --fix

bench: build-tests ## run bench/*: each prints a table and writes bench/results/*.json
	@scripts/bench

tsan: build-tests ## the concurrency tests under ThreadSanitizer
	ctest --test-dir build/dev --output-on-failure -R '^tsan\.'

asan: build/asan/build.ninja ## C++ tests and Python core tests under ASan and UBSan
	@cmake --build build/asan -j $(JOBS)
	@scripts/asan

wheel: $(STAMP) ## dist/*.whl for this Python and this torch
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean: ## remove everything that was built (not .venv)
	rm -rf build dist bench/results python/tenure/_build.py python/tenure/include python/tenure/lib
	rm -f python/tenure/*.so
	find python tests -name __pycache__ -prune -exec rm -r {} +
