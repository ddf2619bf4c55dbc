"""The names that a path tells, and the lines that it blames, one by one."""

from __future__ import annotations

import contextlib
import functools
import logging
import logging.handlers
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import leaking
import tenure
from leaking import STEPS, leak, words
from tenure.inspect import source, suspects
from tenure.inspect.hops import Hop

line_with = functools.partial(leaking.line_with, __file__)


def remember(tensor: torch.Tensor, scale: float = 1.0, memory: list[torch.Tensor] = []) -> None:  # noqa: B006
    memory.append(tensor * scale)


def note(tensor: torch.Tensor, *, noted: dict[int, torch.Tensor] = {}) -> None:  # noqa: B006
    noted[len(noted)] = tensor


def test_a_default_argument_is_told_by_name_with_the_line_that_keeps() -> None:
    try:
        found = leak(lambda _: remember(torch.zeros(4096)))
        assert "memory (default argument of remember)" in words(found)
        assert f"kept at {line_with('memory.append(')}" in words(found)
    finally:
        assert remember.__defaults__ is not None
        remember.__defaults__[1].clear()
    try:
        found = leak(lambda _: note(torch.zeros(4096)))
        assert "noted (default argument of note)" in words(found)
        assert f"kept at {line_with('noted[len(')}" in words(found)
    finally:
        assert note.__kwdefaults__ is not None
        note.__kwdefaults__["noted"].clear()


class Guard:
    """Each error is told with the last one."""

    def __init__(self) -> None:
        self.last: Exception | None = None

    def check(self, batch: torch.Tensor) -> None:
        try:
            batch.view(-1, 3)  # its size is no multiple
        except RuntimeError as error:
            error.__cause__ = self.last
            self.last = error

    def forget(self) -> None:
        self.last = None


def test_a_line_that_lets_go_is_no_line_that_keeps() -> None:
    guard = Guard()
    found = leak(lambda _: guard.check(torch.zeros(4096)))
    assert f"(kept at {line_with('self.last = error')})" in words(found)


@pytest.mark.parametrize("line", ["out, h = cell(x, h)", "out, (h, c) = cell(x, (h, c))"])
def test_a_state_that_is_unpacked_is_carried_on(tmp_path: Path, line: str) -> None:
    file = tmp_path / "cell.py"
    file.write_text(f"h = 0\n{line}\n")
    assert source.lines_that_add(str(file), "h") == (2,)
    assert source.lines_that_add(str(file), "out") == ()


def test_a_history_that_has_a_bound_is_no_leak_while_it_fills() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=30)

    def closure() -> float:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.randn(8, 64)) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    with tenure.watch(quiet=True) as session:
        for step in range(160):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
            tenure.step()
            if step == 22:
                filling = session.verdict()
        full = session.verdict()
    assert filling["verdict"] == "growth", filling
    assert "something that has a bound fills" in filling["ranks"][0]["why"]
    assert full["verdict"] == "flat", full["ranks"]


def test_what_is_carried_on_is_named_rather_than_what_is_made_of_it() -> None:
    cell, head = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 8)

    def train() -> dict[str, Any]:
        state = torch.zeros(1, 16, 32)
        with tenure.watch(quiet=True) as session:
            for _ in range(STEPS):
                out, state = cell(torch.randn(16, 24, 16), state)
                scores = head(out)
                tenure.step()
            assert scores.requires_grad
            return session.verdict()

    suspect = train()["suspects"][0]
    assert words(suspect).startswith("state (local of "), words(suspect)
    assert f"kept at {line_with('out, state = cell(')}" in words(suspect)
    (marked,) = [hop for hop in suspect["holders"][0] if hop.get("leak")]
    assert marked["kind"] == "graph"


def test_a_chain_that_is_still_short_is_marked_where_it_gets_longer() -> None:
    texts = ["newest (local of main)", *[".before of Phase"] * 4, ".optimizer of Phase", "tensor"]
    hops = [Hop("attribute", text, elements=[at]) for at, text in enumerate(texts)]
    # Steps that lie behind each: those of the last two are not counted.
    assert suspects._mark(hops, [10, 10, 9, 8, 7, 6, 1]) == 1
    assert [hop.text for hop in hops if hop.leak] == [".before of Phase"]
    assert hops[1].leak


def test_a_chain_of_functions_is_told_with_the_line_that_makes_it_longer() -> None:
    def wrapped(inner: Callable[[], object], tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: (inner, tensor)

    outermost: Callable[[], object] = object

    def body(_: int) -> None:
        nonlocal outermost
        outermost = wrapped(outermost, torch.zeros(4096))

    assert f"(kept at {line_with('outermost = wrapped')}" in words(leak(body))


@contextlib.contextmanager
def padded(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor


def test_what_a_library_keeps_is_blamed_on_the_line_that_gives_it() -> None:
    stack = contextlib.ExitStack()
    with contextlib.closing(stack):
        found = leak(lambda _: consume(stack.enter_context(padded(torch.zeros(4096)))))
    assert "stack (" in words(found)
    assert f"(kept at {line_with('found = leak(lambda _: consume(stack.enter')}" in words(found)


LOGS = 'LOG.debug("%s in'
LOG = logging.Logger("job")
LOG.addHandler(logging.handlers.MemoryHandler(1_000_000))


def test_a_record_that_a_handler_keeps_is_blamed_on_the_line_that_logs() -> None:
    def body(step: int) -> None:
        LOG.setLevel(logging.DEBUG)
        LOG.debug("step %d of %d", 1, STEPS)
        LOG.debug("%s in step %d", torch.zeros(4096), step)

    found = leak(body)
    assert ".buffer of MemoryHandler" in words(found)
    assert f"(kept at {line_with(LOGS)})" in words(found)


class Job:
    """What a finalizer waits for."""


def test_an_argument_of_a_finalizer_is_blamed_on_the_line_that_makes_it() -> None:
    jobs: list[Job] = []

    def body(_: int) -> None:
        jobs.append(job := Job())
        weakref.finalize(job, consume, torch.zeros(4096))

    found = leak(body)
    assert "._registry of finalize" in words(found)
    assert f"(kept at {line_with('weakref.finalize(')})" in words(found)


def test_a_hook_of_several_gradients_is_told_with_the_line_that_registers_it() -> None:
    model = nn.Linear(4, 4)

    def body(_: int) -> None:
        tensor = torch.zeros(4096)
        register_multi_grad_hook(list(model.parameters()), lambda _: consume(tensor))

    assert line_with("register_multi_grad_hook(") in words(leak(body))


class Prompts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.ParameterList()

    def learn(self) -> None:
        self.learned.append(torch.zeros(4096))


def test_what_an_optimizer_of_the_moment_has_too_is_told_through_who_keeps_it() -> None:
    prompts = Prompts()
    momentary = None

    def body(_: int) -> None:
        nonlocal momentary
        prompts.learn()
        momentary = torch.optim.SGD(prompts.parameters(), lr=0.1)

    found = leak(body)
    assert ".learned of Prompts" in words(found)
    assert f"(kept at {line_with('self.learned.append')})" in words(found)


def test_an_attribute_of_an_exception_is_none_of_its_arguments() -> None:
    errors: list[Exception] = []

    def body(_: int) -> None:
        error = ValueError("odd")
        error.__dict__["batch"] = torch.zeros(4096)
        errors.append(error)

    found = leak(body)
    assert ".batch of ValueError" in words(found)
    assert found["advice"] == ""


def test_a_line_that_puts_less_is_not_blamed_beside_one_that_puts_more(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "history = []\n"
        "history.append(start())\n"
        "def step(loss):\n"
        "    history.append(loss.item())\n"
        "    history.append((loss.detach().cpu(), 'a', float(loss)))\n"
        "    history.append(loss)\n"
        "    log.info('loss %s', loss)\n"
        "    log.info(f'loss {loss}')\n"
        "import logging as lg\n"
        "log = lg.getLogger(name)\n"
    )
    assert source.lines_that_add(str(file), "history", graph=True) == (6,)
    assert source.lines_that_add(str(file), "history") == (5, 6)
    assert source.lines_that_use(str(file), "logging") == (7,)


def consume(_: object) -> None:
    """For values that are of no use."""
