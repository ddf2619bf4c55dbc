"""The names that a path tells, and the lines that it blames, one by one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leaking
import tenure
from leaking import STEPS, leak, words
from tenure.inspect import source

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


@contextlib.contextmanager
def padded(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor


def test_what_a_library_keeps_is_blamed_on_the_line_that_gives_it() -> None:
    stack = contextlib.ExitStack()
    with contextlib.closing(stack):
        found = leak(lambda _: consume(stack.enter_context(padded(torch.zeros(4096)))))
    assert "stack (" in words(found)
    assert f"(kept at {line_with('found = leak(lambda _: consume(stack.enter')}" in words(found)


def consume(_: object) -> None:
    """For values that are of no use."""
