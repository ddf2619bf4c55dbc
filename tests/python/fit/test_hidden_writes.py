"""Writes that no call of an in-place operator on a plain tensor shows: gradients are plain's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fitting import Job, grads, inside, same_as_plain, steady, tight, train
from offloading import Context


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))


class Wrapper(Tensor):
    """Does to a tensor inside what is asked of it."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapper:
        out: Wrapper = Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        return out

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        inside = tree_map(lambda x: x.inside if isinstance(x, Wrapper) else x, args)
        out = op(*inside, **(kwargs or {}))
        return args[0] if op._schema.is_mutable and op._schema.returns else out


class Flattened(Wrapper):
    """Says of what it is made, and not by attributes."""

    __slots__ = ("hidden",)

    def __init__(self, inside: Tensor) -> None:
        self.hidden = inside

    @property
    def inside(self) -> Tensor:  # type: ignore[override]
        return self.hidden

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["hidden"], None


DEEP: dict[str, Callable[[Tensor], object]] = {
    "by vmap": lambda x: torch.vmap(lambda row: row.mul_(2))(x),
    "by vmap in vmap": lambda x: torch.vmap(torch.vmap(lambda row: row.mul_(2)))(x.view(2, -1, 64)),
    "in a wrapper": lambda x: Wrapper(x).mul_(2),
    "in a wrapper's wrapper": lambda x: Wrapper(Wrapper(x)).mul_(2),
    "in one that says so": lambda x: Flattened(x).mul_(2),
    "in several": lambda x: torch._foreach_mul_([Wrapper(x), Wrapper(torch.ones(4))], 2.0),
}


@pytest.mark.parametrize("write", DEEP.values(), ids=DEEP.keys())
@pytest.mark.parametrize("always", [True, False])
def test_deep_down(write: Callable[[Tensor], object], always: bool) -> None:
    """In every step; or in one whose plan has such a write to something else in its place."""
    other = torch.ones(256, 64)
    shifts: list[Tensor] = []
    late = False

    def make() -> Job:
        model = Layers()
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)) / 8

        def loss(_: int) -> Tensor:
            h, shift = x, shifts[0]
            for layer in model.layers:
                h = layer(h.relu() + shift)
            write(shift if always or late else other)
            return h.square().mean()

        return Job(model, loss)

    def run(job: Job, n: int, context: Context) -> None:
        shifts[:] = [torch.full((256, 64), 0.1)]
        inside(job, n, context)

    def gradients(context: Context) -> list[bytes]:
        job.model.zero_grad(set_to_none=True)
        run(job, 0, context)
        return grads(job.model)

    job, fit = tight(make, run, part=0.2, audit=0.0)
    plain = gradients(nullcontext())
    for n in range(6):
        late = n == 5
        assert gradients(fit) == plain, n
    assert fit.stats().mode == "planned"


@pytest.mark.filterwarnings("ignore:this step did not follow")
@pytest.mark.parametrize("training", [True, False])
def test_running_figures_of_a_batch_norm(training: bool) -> None:
    """Its operator writes to them without saying so; after five steps without, or in all."""

    class Normed(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer((x.relu() - self.norm.running_mean).sin())
            return self.norm(x)

    def make() -> Job:
        model = Normed().train(training)
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        return Job(model, lambda n: model(x + n).square().mean())

    def run(job: Job, n: int, context: Context) -> None:
        job.model.train(training or n >= 5)
        inside(job, n, context)

    plain = steady(make, 6, run)
    job, fit = tight(make, run, part=0.3, audit=0.0)
    modes: list[str] = []
    assert train(job, 6, run, fit, lambda: modes.append(fit.stats().mode)) == plain
    assert modes[3:5] == ["planned"] * 2
    assert fit.stats().dropped_bytes > 0, (modes, str(fit), fit.stats().diverged)


def test_what_only_the_version_counter_tells_of_in_every_step() -> None:
    """As kernels of compilers write to buffers, and other threads to anything."""

    class Averaging(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(256, 64))
            self.average: Tensor

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x.relu() + self.average)
            last = x.detach()
            thread = threading.Thread(target=lambda: self.average.lerp_(last, 0.1))
            thread.start()
            thread.join()
            return x

    def make() -> Job:
        model = Averaging()
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        return Job(model, lambda n: model(x + n).square().mean())

    same_as_plain(make, part=0.2)
