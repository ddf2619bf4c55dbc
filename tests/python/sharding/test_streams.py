"""A unit whose forward and backward run on several streams: who comes after whom.

On the fake device a stream that is held is slow, and memory that was freed is poisoned and
given to the next tensor at once. Without the fence that a test is about, someone reads what is not
there yet or not there any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed as dist
from torch import nn

import tenure

Fake = ModuleType
SIZE = 1024


@pytest.fixture(autouse=True)
def _alone(fake: Fake) -> Iterator[None]:
    fake.set_memory_policy(reuse_freed=True, poison_freed=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def filled(value: float) -> torch.Tensor:
    """Once the current stream has got there: what it holds back is a copy."""
    return torch.empty(SIZE, device="fake").copy_(
        torch.full((SIZE,), value, device="fake"), non_blocking=True
    )


class Slow(torch.autograd.Function):
    """Its gradient is 3, when the stream that it runs on has got there."""

    @staticmethod
    def forward(_ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
        return filled(3)


class Reads(torch.autograd.Function):
    """Reads a weight in backward, when the stream that it runs on has got there."""

    read: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        Reads.read.append(torch.empty_like(weight).copy_(weight, non_blocking=True))
        return gradient, None


class Unit(nn.Module):
    """What it computes is the test's."""

    def __init__(self, run: Callable[[Unit, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((SIZE,), 2.0))
        self.second = nn.Parameter(torch.full((SIZE,), 2.0))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def sharded(*runs: Callable[[Unit, torch.Tensor], torch.Tensor], **how: Any) -> nn.Module:
    return tenure.shard(nn.Sequential(*map(Unit, runs)).to("fake"), **how)


def values(tensor: torch.Tensor) -> set[float]:
    return set(tensor.tolist())


def test_gradients_of_two_streams_are_put_together(fake: Fake) -> None:
    side = fake.new_stream()

    def run(unit: Unit, x: torch.Tensor) -> torch.Tensor:
        y = x * unit.first  # its gradient comes last
        with side:
            other = Slow.apply(unit.second)
        torch.accelerator.current_stream().wait_stream(side)
        return y + other

    model = sharded(run)
    loss = model(torch.ones(SIZE, device="fake")).sum()
    fake.hold(side)
    loss.backward()
    fake.release(side)
    assert values(model.tenure.full_gradients()["0.second"]) == {3}
    assert values(model.tenure.full_gradients()["0.first"]) == {1}


def test_gradients_may_be_given_on_one_stream_and_added_up_on_another(fake: Fake) -> None:
    side = fake.new_stream()
    model = sharded(lambda unit, x: x * unit.first)
    sharder = model.tenure.sharder
    sources = [torch.full((SIZE,), float(value), device="fake") for value in (3, 4)]
    with side:
        fake.hold(side)
        for index, source in enumerate(sources):
            gradient = torch.empty_like(source).copy_(source, non_blocking=True)
            sharder.take(0, 0, index, gradient)
    del gradient
    sharder.add_up(0)
    [one] = sharder.end_backward(outermost=True)
    copied = one.mean.clone()
    fake.release(side)
    assert values(copied) == {3, 4}


class Two(nn.Module):
    """The first block is on another stream, and computes nothing that would wait for it."""

    def __init__(self, side: torch.Stream) -> None:
        super().__init__()
        first, second = Unit(lambda _unit, x: x), Unit(lambda unit, x: x * unit.first)
        self.blocks = nn.ModuleList([first, second])
        self.side = side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.side:
            self.blocks[0](x)
        return self.blocks[1](x)


def test_what_is_gathered_ahead_is_there_on_another_stream(fake: Fake) -> None:
    side = fake.new_stream()
    model = tenure.shard(Two(side).to("fake"))
    x = torch.ones(SIZE, device="fake")
    with torch.no_grad():
        model(x)
        for piece in model.parameters():
            piece.fill_(5)
        torch.accelerator.synchronize()
        fake.hold(side)
        found = model(x)
        fake.release(side)
    assert values(found) == {5}


def test_a_unit_stays_until_all_streams_have_read_it(fake: Fake) -> None:
    side = fake.new_stream()

    def run(unit: Unit, x: torch.Tensor) -> torch.Tensor:
        y = x * unit.first
        with side:
            other = Reads.apply(aside, unit.second.detach())
        torch.accelerator.current_stream().wait_stream(side)
        return y + other

    model = sharded(run, prefetch=0)
    aside = torch.ones(SIZE, device="fake", requires_grad=True)
    loss = model(torch.ones(SIZE, device="fake")).sum()
    fake.hold(side)
    loss.backward()
    assert model.tenure.stats().gathered_bytes == 0
    others = [torch.zeros(2 * SIZE, device="fake") for _ in range(4)]  # in its memory, perhaps
    fake.release(side)
    assert values(Reads.read.pop()) == {2}
    del others
