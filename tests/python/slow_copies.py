"""An Offload whose copies run when the test says so, and what its tests save and look at."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import tenure
from offloading import side_streams

N = 1024  # floats of a storage: one page

Use = Callable[[tuple[Tensor, ...]], object]


class Save(torch.autograd.Function):
    """Saves tensors; backward gives them to `use`, computes nothing and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: Use, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.use = use
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        del grads
        saved = ctx.saved_tensors
        ctx.use(saved)
        return None, None, *(None for _ in saved)


class Slow:
    """An Offload whose copies run when the test says so."""

    def __init__(self, fake: ModuleType, **options: Any) -> None:
        fake.set_memory_policy(reuse_freed=True, poison_freed=True)
        self.fake = fake
        self.x = torch.ones(1, device="fake", requires_grad=True)
        self.grad = torch.ones(1, device="fake")
        self.offload = tenure.Offload(min_bytes=1, **options)
        # The first step is measured, and the host memory it takes is there from now on: one slab.
        # No later step has its shape, so none is planned, and none makes compute wait for copies.
        with self.offload:
            self.backward(self.save(full(0, 8 * N)))
        self.streams = side_streams(fake)

    def save(self, *saved: Tensor, use: Use = lambda _: None) -> Tensor:
        return Save.apply(self.x, use, *saved)

    def backward(self, saved: Tensor, *, keep: bool = False) -> None:
        saved.backward(self.grad, retain_graph=keep)

    def hold(self) -> None:
        for stream in self.streams:
            self.fake.hold(stream)

    def busy(self) -> list[torch.Stream]:
        return [stream for stream in self.streams if self.fake.pending(stream)]

    def advance(self, streams: list[torch.Stream]) -> None:
        """As far as their waits allow."""
        while sum(self.fake.advance(stream, 1) for stream in streams):
            pass

    def run(self) -> None:
        """All that is queued, everywhere."""
        for stream in self.streams:
            self.fake.release(stream)
        torch.accelerator.synchronize()
        self.offload.settle()


def full(value: float, size: int = N) -> Tensor:
    return torch.full((size,), float(value), device="fake")


def values(tensor: Tensor) -> set[float]:
    return set(tensor.tolist())
