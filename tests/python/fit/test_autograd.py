"""Autograd as users know it: whatever they do with a graph, gradients are those without Fit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fitting import Job, deep, grads, inside, same_as_plain, tight, train
from offloading import Context


class Scaled(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grads[0] * y + x


class ThroughNumpy(torch.autograd.Function):
    """Writes to what it saves where PyTorch does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.numpy()[:] *= 3
        ctx.save_for_backward(y)
        return y * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grads[0] * y


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x)
        return out


def with_layer(layer: nn.Module) -> Job:
    """In the middle of layers that can be made again."""
    job = deep()
    model = nn.Sequential(*list(job.model.children())[:6], layer, *list(job.model.children())[6:])
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    return Job(model, lambda n: model(x + n).square().mean())


def test_a_function_that_saves_what_it_made() -> None:
    same_as_plain(lambda: with_layer(Applied(Scaled.apply)))


def test_a_function_that_writes_through_numpy_is_found_out_before_it_counts() -> None:
    same_as_plain(lambda: with_layer(Applied(ThroughNumpy.apply)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep(2).model

        def forward(self, x: Tensor) -> Tensor:
            out: Any = checkpoint(self.layers, x, use_reentrant=reentrant)
            return out

    same_as_plain(lambda: with_layer(Half()))


def test_a_graph_that_is_retained_where_the_plan_has_one_backward() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            loss = job.loss(n)
            for _ in range(3 * (n == 3)):
                loss.backward(retain_graph=True)
            loss.backward()

    same_as_plain(deep, run=run)


def test_double_backward_where_the_plan_has_none() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            loss = job.loss(n)
            weights = list(job.model.parameters())
            if n == 3:
                found = torch.autograd.grad(loss, weights, create_graph=True)
                loss = loss + sum(g.square().sum() for g in found)
            loss.backward()

    same_as_plain(deep, run=run)


def double(job: Job, n: int, context: Context) -> None:
    with context:
        loss = job.loss(n)
        found = torch.autograd.grad(loss, list(job.model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in found)).backward()


def retained(job: Job, n: int, context: Context) -> None:
    with context:
        loss = job.loss(n)
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("run", [double, retained])
def test_what_is_needed_by_two_backwards_is_kept(run: Any) -> None:
    plain = train(deep(), 6, run)
    job, fit = tight(deep, run)
    assert train(job, 6, run, fit) == plain
    assert fit.stats().mode == "planned"


def test_a_partial_backward() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            loss = job.loss(n)
            if n == 3:
                last = list(job.model[-2].parameters())  # type: ignore[index]
                torch.autograd.grad(loss, last, retain_graph=True)
            loss.backward()

    same_as_plain(deep, run=run)


def test_two_forwards_and_backwards_in_one_context() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            job.loss(n).backward()
            job.loss(n + 10).backward()

    same_as_plain(deep, run=run)


def test_two_forwards_before_their_backwards() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            first, second = job.loss(n), job.loss(n + 10)
            first.backward()
            second.backward()

    same_as_plain(deep, run=run)


class Features(nn.Module):
    """Heads, each with a loss of its own, of features that no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = x.exp().sin()
        out = torch.zeros(())
        for head in self.heads:
            loss = (head(features).sigmoid() * features).tanh().square().mean()
            loss.backward()
            out = out + loss.detach()
        return out


def features() -> Job:
    model = Features()
    x = torch.randn(512, 64)
    return Job(model, lambda n: model(x + n))


def masked() -> Job:
    """The graph of a condition goes at once: what it has saved is saved anew."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    x = torch.randn(512, 64)

    def loss(n: int) -> Tensor:
        y = x + n
        for linear in model:
            y = linear(y)
            y = torch.where(y.sin() > 0, y.exp(), y.cos())
        return y.square().mean()

    return Job(model, loss)


@pytest.mark.parametrize("make", [features, masked])
def test_what_is_saved_anew_once_its_graph_has_gone(make: Callable[[], Job]) -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            loss = job.loss(n)
            if loss.requires_grad:
                loss.backward()

    fit = same_as_plain(make, run=run)
    assert fit.stats().mode == "planned"
    assert fit.stats().peak <= fit.stats().budget


def test_backward_after_the_context() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            loss = job.loss(n)
        loss.backward()

    same_as_plain(deep, run=run, steps=6)


def test_backward_on_another_thread() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            loss = job.loss(n)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

    same_as_plain(deep, run=run)


def test_a_graph_outlives_the_fit() -> None:
    job, fit = tight(deep)
    job.loss(2).backward()
    plain = grads(job.model)
    for n in range(3):
        inside(job, n, fit)
    job.model.zero_grad(set_to_none=True)
    with fit:
        loss = job.loss(2)
    del fit
    loss.backward()
    assert grads(job.model) == plain


def test_forwards_alone_teach_nothing_and_hold_nothing() -> None:
    job, fit = tight(deep)
    for _ in range(3):
        with fit:
            job.loss(0)
    assert fit.plan.rows == []
    inside(job, 0, fit)
    assert fit.plan.rows != []


def test_a_part_that_is_not_recorded_by_autograd() -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.exp().mean(0).sigmoid()
            return x * scale

    same_as_plain(lambda: with_layer(Frozen()))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_layer() -> None:
    torch.compiler.reset()

    def make() -> Job:
        job = with_layer(Applied(torch.compile(deep(1).model, backend="aot_eager")))
        job.loss(0).backward()  # what compiling leaves to Python's collector is of no step
        job.model.zero_grad(set_to_none=True)
        gc.collect()
        return job

    same_as_plain(make, steps=8)  # it makes its constants in the first two
    torch.compiler.reset()
