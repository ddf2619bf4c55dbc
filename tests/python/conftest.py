"""What every Python test may use: the helpers in this folder, and two fixtures."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

# With pytest's importlib mode nothing else puts this folder there.
sys.path.insert(0, str(Path(__file__).parent))

# A shell starts what runs in the background with SIGINT ignored, and all that this process starts
# would inherit that. Tests that send it must not depend on how they were started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from browsing import browser
from fake_process import fake, pytest_configure, pytest_runtest_protocol

# Files in the order in which workers take them. The first has tests with the fixture `fake`: it
# runs all such tests of all files. Then come those that look at all objects of the process, while
# they are few; then those that take long, longest first, so that none is left alone at the end.
FIRST = [
    "core/test_release_refusals.py",
    "telemetry/test_flight.py",
    "inspect/test_census.py",
    "core/test_ledger.py",
    "inspect/test_holders.py",
    "inspect/test_zoo.py",
    "inspect/test_attach.py",
    "inspect/test_programs.py",
    "sharding/test_compiled.py",
    "train/test_run.py",
    "train/test_loop.py",
    "report/test_report.py",
    "inspect/test_launchers.py",
    "inspect/test_explained.py",
    "inspect/test_runs.py",
    "telemetry/test_monitor.py",
    "test_examples.py",
    "inspect/test_many_ranks.py",
    "store/test_examples.py",
    "sharding/test_training.py",
    "store/test_seed_000.py",
    "offload/test_compile.py",
    "inspect/test_attach_refused.py",
    "telemetry/test_top_live.py",
    "inspect/test_options.py",
    "inspect/test_many.py",
    "pipelining/test_memory.py",
    "test_ranks.py",
]
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests for workers, which take one file after another."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {FOLDER / name: number for number, name in enumerate(FIRST)}
        items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """Tests that look for garbage look through what they made, and not through all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share a process: one that leaves the store keeps the next from joining by itself."""
    if "tenure.store.joining" in sys.modules:
        monkeypatch.setattr(sys.modules["tenure.store.joining"], "_left", None)


__all__ = ["browser", "fake", "pytest_configure", "pytest_runtest_protocol"]
