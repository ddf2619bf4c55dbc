"""The lines of the program that a path blames, for what is filled in less direct ways."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import warnings
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
Filled = dict[str, Any]


def kept_at(suspect: dict[str, Any]) -> str:
    """The lines that the leaking reference blames."""
    (marked,) = [hop["text"] for hop in suspect["holders"][0] if hop.get("leak")]
    return str(marked).partition("(kept at ")[2].removesuffix(")")


@pytest.mark.parametrize(
    "line",
    [
        "kept = kept[-4:]",
        "self.kept = self.kept[-n:].clone()",
        "kept = tuple(one.detach() for one in kept)",
        "kept = [job for job in kept if not job.done()]",
        "kept = {key: one.detach() for key, one in kept.items()}",
        "kept = list(kept)",
        "kept = kept.data",
    ],
)
def test_a_line_that_puts_back_what_there_was_keeps_nothing(tmp_path: Path, line: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"while training:\n    {line}\n    kept = step(kept)\n")
    assert source.lines_that_add(str(file), "kept") == (3,)


@pytest.mark.parametrize("line", ["kept = [f(one) for one in kept]", "kept = kept * 2"])
def test_a_line_that_makes_more_of_what_there_was_keeps(tmp_path: Path, line: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"while training:\n    {line}\n    kept = step(kept)\n")
    assert source.lines_that_add(str(file), "kept") == (2, 3)


def test_who_sets_what_is_empty_keeps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "self.kept = []\n"
        "self.kept = defaultdict(list)\n"
        "self.kept = deque(maxlen=3)\n"
        "self.kept = OrderedDict()\n"
        "self.kept = {}\n"
        "self.kept = [out]\n"
    )
    assert source.lines_that_set(str(file), "kept") == (6,)


def test_a_method_that_goes_by_another_name() -> None:
    outs: list[torch.Tensor] = []
    push = outs.append
    found = leak(lambda _: push(torch.zeros(4096)))
    assert kept_at(found) == line_with("found = leak(lambda _: push(")


def collect(store: list[torch.Tensor], value: torch.Tensor) -> None:
    store += [value]


def test_a_function_that_fills_what_it_is_given() -> None:
    given: list[torch.Tensor] = []
    found = leak(lambda _: collect(given, torch.zeros(4096)))
    assert len(given) == STEPS
    assert kept_at(found) == line_with("found = leak(lambda _: collect(")


class RefusedError(Exception):
    """A batch was refused."""


def refuse(batch: torch.Tensor, last: RefusedError | None) -> None:
    raise RefusedError(batch.shape) from last


def test_errors_that_are_told_with_the_last_one() -> None:
    last: RefusedError | None = None

    def body(_: int) -> None:
        nonlocal last
        try:
            refuse(torch.zeros(4096), last)
        except RefusedError as error:
            last = error

    assert kept_at(leak(body)) == line_with("raise RefusedError(")


def test_global_variables_with_ever_new_names() -> None:
    def body(step: int) -> None:
        globals()[f"_kept_{step}"] = torch.zeros(4096)

    try:
        assert kept_at(leak(body)) == line_with("globals()[f")
    finally:
        for step in range(STEPS):
            del globals()[f"_kept_{step}"]


class Odd(UserWarning):
    """A warning about a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("odd")
        self.tensor = tensor


def test_a_list_that_a_library_fills_blames_who_calls_that() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = leak(lambda _: warnings.warn(Odd(torch.zeros(4096)), stacklevel=1))
    assert len(caught) == STEPS
    assert kept_at(found) == line_with("found = leak(lambda _: warnings.warn")


def batches() -> Iterator[torch.Tensor]:
    while True:
        yield torch.zeros(4096)


def test_an_iterator_that_keeps_what_it_gave_blames_the_line_that_makes_it() -> None:
    data = itertools.cycle(batches())
    found = leak(lambda _: print(next(data).shape))
    assert "itertools.cycle" in words(found)
    assert kept_at(found) == line_with("data = itertools.cycle(")


def test_callbacks_of_a_future_that_is_never_done() -> None:
    async def train() -> dict[str, Any]:
        stopped = asyncio.get_running_loop().create_future()
        with tenure.watch(quiet=True) as session:
            for _ in range(STEPS):
                stopped.add_done_callback(functools.partial(collect, [torch.zeros(4096)]))
                stopped.remove_done_callback(print)
                tenure.step()
            verdict = session.verdict()
        stopped.cancel()
        return verdict

    assert kept_at(asyncio.run(train())["suspects"][0]) == line_with("stopped.add_done_callback(")


def test_parameters_that_are_given_to_a_group_of_an_optimizer() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def body(_: int) -> None:
        weight = nn.Parameter(torch.zeros(4000))
        optimizer.param_groups[0]["params"].append(weight)
        (model(torch.randn(8, 8)).sum() + weight.sum()).backward()
        optimizer.step()

    assert kept_at(leak(body)) == line_with("optimizer.param_groups[0]")


class Block(nn.Module):
    """One that knows its net, though not as a submodule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.owner = [net]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(self)


def test_a_cycle_is_told_from_an_attributes_owner() -> None:
    gc.disable()
    try:
        found = leak(lambda _: print(Net().training))
    finally:
        gc.enable()
    assert found["cycle"]
    assert f".owner of Block (kept at {line_with('self.owner = [net]')})" in words(found)
