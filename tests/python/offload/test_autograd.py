"""Autograd as users know it: whatever they do with a graph, gradients are those without Offload."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tenure
from offloading import Context, batch, blocks, drop_graphs, equal, gradients, grads_of

Fake = ModuleType


class StepFailedError(Exception):
    pass


class DoubledInPlace(torch.autograd.Function):
    """x * x, written over a copy of x that is marked dirty and saved after the write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        work.mul_(x)
        ctx.mark_dirty(work)
        return work

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grads[0] * x, grads[0] * x


class Exp(torch.autograd.Function):
    """Saves its own output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grads[0] * y


class OnBoth:
    device: str
    target: str

    def offload(self, *models: nn.Module, **options: Any) -> tenure.Offload:
        return tenure.Offload(*models, target=self.target, min_bytes=1, **options)

    def job(self) -> tuple[nn.Sequential, Tensor]:
        return blocks(device=self.device), batch(device=self.device)

    def check(self, step: Callable[[nn.Sequential, Tensor, Context], Any], steps: int = 4) -> None:
        """A step under Offload, several times, has the result of the same step without."""
        model, x = self.job()
        plain = step(model, x, nullcontext())
        offload = self.offload(model)
        for n in range(steps):
            model.zero_grad()
            assert equal(step(model, x, offload), plain), f"step {n}"
        assert offload.stats().saved_bytes > 0

    def test_retain_graph(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                loss = model(x).square().sum()
                loss.backward(retain_graph=True)
                loss.backward(retain_graph=True)
                loss.backward()
            return grads_of(model)

        self.check(step)

    def test_double_backward(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            weights = list(model.parameters())
            with context:
                loss = model(x).square().sum()
                grads = torch.autograd.grad(loss, weights, create_graph=True)
                penalty = sum((g.square().sum() for g in grads), torch.zeros((), device=x.device))
                (loss + penalty).backward()
            return [*(g.detach().cpu() for g in grads), *grads_of(model)]

        self.check(step)

    def test_several_forwards_before_their_backwards(self) -> None:
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):

            def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
                with context:
                    losses = [model(x * (n + 1)).square().sum() for n in range(3)]
                    for n in order:  # noqa: B023  called at once
                        losses[n].backward()
                return grads_of(model)

            self.check(step)

    def test_forwards_without_backward(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                model(x)
                unused = model(x)
                model(x).square().sum().backward()
            del unused
            with context:
                model(x)
            return grads_of(model)

        self.check(step)

    def test_partial_backward(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                middle = model[:5](x)
                loss = model[5:](middle).square().sum()
                last = list(model[6].parameters())
                grads = torch.autograd.grad(loss, [middle, *last], retain_graph=True)
                loss.backward()
            return [*(g.cpu() for g in grads), *grads_of(model)]

        self.check(step)

    def test_a_part_of_the_graph_is_never_asked_for(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                loss = model(x).square().sum()
                grads = torch.autograd.grad(loss, list(model[6].parameters()))
            return [g.cpu() for g in grads]

        self.check(step)

    def test_backward_after_the_block(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                loss = model(x).square().sum()
            loss.backward()
            return grads_of(model)

        self.check(step, steps=6)

    def test_backward_during_the_next_block(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                first = model(x).square().sum()
            with context:
                second = model(2 * x).square().sum()
                first.backward()
                second.backward()
            return grads_of(model)

        self.check(step)

    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_an_exception(self, where: str) -> None:
        model, x = self.job()
        plain = gradients(model, x)
        offload = self.offload(model)
        for n in range(6):
            failing = n in (0, 3)

            def fail(*_: Any, failing: bool = failing) -> None:
                if failing:
                    raise StepFailedError

            handle = (
                model[4].register_forward_hook(fail)
                if where == "forward"
                else model[4].register_full_backward_hook(fail)
            )
            if failing:
                with pytest.raises(StepFailedError):
                    gradients(model, x, offload)
            else:
                assert equal(gradients(model, x, offload), plain)
            handle.remove()
            self.drop_graphs()
            assert offload.stats().tracked == 0
        assert offload.stats().mode == "planned"

    @pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
    def test_checkpoint(self, reentrant: bool) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            x = x.clone().requires_grad_()
            with context:
                y = checkpoint(model[:3], x * 1, use_reentrant=reentrant)
                y = model[3:4](y)
                y = checkpoint_sequential(model[4:], 2, y, use_reentrant=reentrant)
                y.square().sum().backward()
            assert x.grad is not None
            return [x.grad.cpu(), *grads_of(model)]

        self.check(step)

    def test_checkpoints_offload_the_inputs_of_what_is_recomputed(self) -> None:
        model, x = self.job()
        offload = self.offload(model)
        for _ in range(3):
            with offload:
                y = checkpoint(model[1:], model[0](x), use_reentrant=False)
                y.sum().backward()
            assert offload.stats().moved_out_bytes >= x.nbytes
        assert offload.stats().saved_storages <= 3, "what is recomputed is not saved"

    @pytest.mark.parametrize("function", [Exp, DoubledInPlace])
    def test_custom_functions(self, function: Any) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                y = model(x)
                y = function.apply(y, y * 2) if function is DoubledInPlace else function.apply(y)
                y.sin().sum().backward()
            return grads_of(model)

        self.check(step)

    def test_ops_that_work_in_place(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                y = model[:4](x)
                y = torch.relu_(y * 2)
                z = (y + 1).sigmoid_() + (y * 3).clamp_(max=3)
                z[:, 1:].mul_(2)
                model[4:](z).square().sum().backward()
            return grads_of(model)

        self.check(step)

    def test_two_models_in_one_step(self) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            other = blocks(layers=2, device=self.device)
            with context:
                (model(x) * other(x).detach()).sum().backward()
                (model(x).detach() * other(x)).sum().backward()
            return grads_of(model) + grads_of(other)

        self.check(step)

    def test_two_offloads_take_turns(self) -> None:
        model, x = self.job()
        plain = gradients(model, x)
        offloads = [self.offload(model), self.offload(model)]
        for n in range(6):
            assert equal(gradients(model, x, offloads[n % 2]), plain)
        assert [offload.stats().steps for offload in offloads] == [3, 3]

    def test_threads_with_an_offload_each(self) -> None:
        plain = gradients(*self.job())
        results: list[bool] = []

        def train() -> None:
            model, x = blocks(device=self.device), batch(device=self.device)
            model.load_state_dict(weights)
            offload = self.offload(model)
            results.extend(equal(gradients(model, x, offload), plain) for _ in range(8))
            assert offload.stats().steps == 8

        weights = self.job()[0].state_dict()
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 16

    def test_an_offload_inside_another_takes_what_is_saved_there(self) -> None:
        model, x = self.job()
        plain = gradients(model, x)
        outer, inner = self.offload(model), self.offload(model)
        for _ in range(3):
            model.zero_grad()
            with outer:
                y = model[:3](x)
                with inner:
                    y = model[3:6](y)
                model[6:](y).square().sum().backward()
            assert equal(grads_of(model), plain)
        assert outer.stats().saved_bytes > 0
        assert inner.stats().saved_bytes > 0
        assert outer.stats().saved_storages + inner.stats().saved_storages >= 16

    def test_entering_twice(self) -> None:
        model, x = self.job()
        plain = gradients(model, x)
        offload = self.offload(model)
        model.zero_grad()
        with offload:
            with pytest.raises(tenure.InputError, match="is entered already"):
                offload.__enter__()
            model(x).square().sum().backward()
        assert equal(grads_of(model), plain)
        assert offload.stats().moved_out_bytes > 0, "the first entry holds"

    def drop_graphs(self) -> None:
        pass


class TestOnTheCpu(OnBoth):
    device = "cpu"
    target = "copy"

    @pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype: torch.dtype) -> None:
        def step(model: nn.Sequential, x: Tensor, context: Context) -> list[Tensor]:
            with context:
                with torch.autocast("cpu", dtype=dtype):
                    loss = model(x).float().square().sum()
                loss.backward()
            return grads_of(model)

        self.check(step)


@pytest.mark.usefixtures("fake")
class TestOnADevice(OnBoth):
    device = "fake"
    target = "host"

    def drop_graphs(self) -> None:
        drop_graphs()
