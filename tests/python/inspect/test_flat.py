"""assert_flat, the pytest marker, explain."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tenure
from forks import run_forked


def test_assert_flat_passes_what_is_flat() -> None:
    model = torch.nn.Linear(64, 64)
    tenure.assert_flat(lambda: model(torch.randn(8, 64)).sum().backward())


def test_assert_flat_names_what_grows() -> None:
    model, losses = torch.nn.Linear(64, 64), []
    with pytest.raises(tenure.MemoryGrows, match="losses") as caught:
        tenure.assert_flat(lambda: losses.append(model(torch.randn(64, 64))))
    assert caught.value.verdict["suspects"]


def test_released_storages_that_something_keeps_do_not_matter() -> None:
    kept = torch.randn(1000)
    tenure.release(kept)
    tenure.assert_flat(lambda: None, steps=14)
    tenure.refill(kept, torch.randn(1000))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(tenure.InputError, match="steps=3 is too few"):
        tenure.assert_flat(lambda: None, steps=3)


async def only_begun() -> None:
    """Does nothing until it is awaited."""


async def one_after_another() -> AsyncIterator[None]:
    yield


def generated() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    "step",
    [only_begun, lambda: only_begun(), one_after_another, generated],
    ids=["coroutine", "lambda", "async generator", "generator"],
)
def test_a_step_that_is_never_run_is_refused(step: Callable[[], object]) -> None:
    with pytest.raises(tenure.InputError, match="only begins when it is called, so no step"):
        tenure.assert_flat(step, steps=14)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": "train"}, "str cannot be called: give it a function"),
        ({"steps": "20"}, "steps='20' is no whole number"),
        ({"steps": 20.5}, "steps=20.5 is no whole number"),
        ({"warmup": -1}, "warmup=-1 is no whole number from 0 on"),
        ({"step": lambda: (i for i in range(3))}, "only begins when it is called"),
    ],
)
def test_wrong_arguments_are_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(tenure.InputError, match=said):
        tenure.assert_flat(**{"step": lambda: None, **given})


def test_steps_are_counted_from_where_it_began() -> None:
    for _ in range(100):
        tenure.step()
    kept: list[torch.Tensor] = []
    with pytest.raises(tenure.MemoryGrows, match="since step \\d ") as caught:
        tenure.assert_flat(lambda: kept.append(torch.zeros(4096)), steps=20)
    assert caught.value.verdict["ranks"][0]["last"] == 19


def test_watching_twice_is_refused() -> None:
    with tenure.watch(quiet=True), pytest.raises(tenure.TenureError, match="watched already"):
        tenure.watch(quiet=True)
    with tenure.watch(quiet=True):
        pass


def marked(folder: Path, tests: str) -> str:
    """What pytest says of a file of tests: each failure once, whatever CI makes of the summary."""
    text = "import asyncio, unittest\nimport pytest, torch\n" + textwrap.dedent(tests)
    (folder / "test_it.py").write_text(text)
    words = ["-m", "pytest", "-q", "-rN", "--strict-markers", folder]
    ended = run_forked(words, cwd=folder)
    return ended.stdout + ended.stderr


def test_the_marker(tmp_path: Path) -> None:
    said = marked(
        tmp_path,
        """
        kept = []
        @pytest.fixture
        def model(): return torch.nn.Linear(64, 64)
        @pytest.fixture
        def grow(): return []
        @pytest.mark.flat_memory(steps=20)
        def test_flat(model): model(torch.randn(8, 64))
        @pytest.mark.flat_memory(steps=20)
        def test_leaky(model): kept.append(model(torch.randn(64, 64)))
        @pytest.mark.flat_memory(steps=20)
        def test_fixture(grow): grow.append(torch.zeros(4096))
        """,
    )
    assert "2 failed, 1 passed" in said
    assert "kept (global of" in said
    assert "held by grow (local of test_fixture) → [" in said
    assert said.count("held by") == 2


def test_the_marker_on_methods(tmp_path: Path) -> None:
    said = marked(
        tmp_path,
        """
        class TestPlain:
            @pytest.mark.flat_memory(steps=20)
            def test_leaky(self): vars(self).setdefault("plain", []).append(torch.zeros(4096))
        class Case(unittest.TestCase):
            def setUp(self): self.kept = []
            @pytest.mark.flat_memory(steps=20)
            def test_leaky(self): self.kept.append(torch.zeros(4096))
            @pytest.mark.flat_memory(steps=20)
            def test_flat(self): torch.zeros(4096)
        """,
    )
    assert "2 failed, 1 passed" in said
    assert "held by self (local of TestPlain.test_leaky) → .plain of TestPlain" in said
    assert "held by self (local of Case.test_leaky) → .kept of Case" in said


def test_what_the_marker_is_given(tmp_path: Path) -> None:
    said = marked(
        tmp_path,
        """
        calls = []
        @pytest.mark.flat_memory(16)
        def test_positional(): calls.append(0)
        def test_called(): assert len(calls) == 16 + 3
        @pytest.mark.flat_memory(16, 3)
        def test_two(): pass
        @pytest.mark.flat_memory(times=16)
        def test_unknown(): pass
        @pytest.mark.flat_memory(3)
        def test_few(): pass
        @pytest.mark.flat_memory
        async def test_async(): pass
        class Case(unittest.IsolatedAsyncioTestCase):
            @pytest.mark.flat_memory
            async def test_async(self): pass
        """,
    )
    assert "5 failed, 2 passed" in said
    assert "flat_memory: one argument without a name is steps, and 2 were given" in said
    assert "flat_memory: there is no argument times" in said
    assert "flat_memory: steps=3 is too few" in said
    assert said.count("mark a plain function that runs its own loop") == 2


def test_explain_tells_python_autograd_and_leases() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    out = weight.sin()
    lease = tenure.hold(weight, "weights")
    found = tenure.explain(weight)
    words = " ".join(found.paths)
    assert "out (local of test_explain_tells_python_autograd_and_leases)" in words
    assert "SinBackward0 saved" in words
    assert len(found.leases) == 1
    assert found.references == 2  # the tensor's and the lease's
    assert found.residue == 0
    del lease, out


def test_explain_tells_all_that_hold_the_tensor() -> None:
    def check(asked: torch.Tensor) -> list[str]:
        return tenure.explain(asked).paths

    cache = {"a": [torch.zeros(64)]}
    (only,) = check(cache["a"][0])
    assert only.startswith("cache (local of test_explain_tells_all")
    registry = [[cache["a"][0]] for _ in range(40)]
    held = check(registry[0][0])
    assert [path.split(" ")[0] for path in sorted(held)] == ["cache", "registry"]
    assert any(path.endswith(", and 39 like it") for path in held)


def test_explain_names_who_asks_if_nobody_else_has_it() -> None:
    asked = torch.zeros(64)
    (path,) = tenure.explain(asked).paths
    assert path.startswith("asked (local of test_explain_names_who_asks")


def test_explain_counts_what_cxx_holds_of_the_tensor_itself() -> None:
    tensor = torch.randn(64)
    assert tenure.explain(tensor).residue == 0
    capsules = [torch.utils.dlpack.to_dlpack(tensor) for _ in range(2)]
    found = tenure.explain(tensor)
    assert found.residue == 2
    assert "2 more references from C++ code" in str(found)
    del capsules
    assert tenure.explain(tensor).residue == 0


def test_explain_tells_saved_tensors() -> None:
    x = torch.randn(64, requires_grad=True)
    out = x.tanh()
    kept = [out.sum()]
    del out
    loss = kept[0]
    saved = loss.grad_fn.next_functions[0][0]._saved_result  # type: ignore[union-attr]
    assert "TanhBackward0" in str(tenure.explain(saved))
