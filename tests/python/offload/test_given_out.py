"""What backward is given: the saved values, in memory that nobody else relies on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenure
from offloading import Context, equal

Job = Callable[[Context, str], list[Tensor]]

SIZE = 64


class Returns(torch.autograd.Function):
    """Backward returns what forward saved, as losses do that compute their gradient in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return (x * gradient).sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


class WritesTo(torch.autograd.Function):
    """Backward writes to what forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        saved.mul_(2)
        return grads[0], None


def leaf(device: str) -> Tensor:
    return torch.ones(SIZE, SIZE, device=device, requires_grad=True)


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def three_backwards(context: Context, device: str) -> list[Tensor]:
    x = leaf(device)
    with context:
        loss = Returns.apply(x, torch.full_like(x, 3.0, requires_grad=False))
        for last in (False, False, True):
            loss.backward(retain_graph=not last)
    return [grad_of(x).cpu()]


def zeroed_in_between(context: Context, device: str) -> list[Tensor]:
    x = leaf(device)
    with context:
        loss = Returns.apply(x, torch.full_like(x, 3.0, requires_grad=False))
        loss.backward(retain_graph=True)
        grad_of(x).zero_()
        loss.backward()
    return [grad_of(x).cpu()]


def held_by_the_caller(context: Context, device: str) -> list[Tensor]:
    x = leaf(device)
    gradient = torch.full((SIZE, SIZE), 3.0, device=device)
    with context:
        Returns.apply(x, gradient).backward()
    grad_of(x).mul_(10)
    return [grad_of(x).cpu(), gradient.cpu()]


def added_to_while_others_need_it(context: Context, device: str) -> list[Tensor]:
    x = leaf(device)
    with context:
        y = x * 1
        gradient = torch.full((SIZE, SIZE), 3.0, device=device)
        early = (x * gradient).sum()  # whose backward comes last
        late = Returns.apply(y, gradient)
        more = (y * 5.0).sum()
        del gradient, y
        (early + more + late).backward()
    return [grad_of(x).cpu()]


def written_to_in_backward(context: Context, device: str) -> list[Tensor]:
    """PyTorch refuses it. The write is seen by nobody else: every node gets what was saved."""
    x = leaf(device)
    with context:
        saved = torch.full((SIZE, SIZE), 3.0, device=device)
        y = x * saved
        z = WritesTo.apply(y, saved)
        del saved, y
        z.sum().backward()
    return [grad_of(x).cpu()]


CASES = [three_backwards, zeroed_in_between, held_by_the_caller, added_to_while_others_need_it]


def check(job: Job, device: str, target: str, plain: list[Tensor]) -> None:
    offload = tenure.Offload(target=target, min_bytes=1)
    moved = []
    for _ in range(4):
        assert equal(job(offload, device), plain)
        moved.append(offload.stats().moved_out_bytes)
    assert max(moved) > 0


@pytest.mark.parametrize("job", CASES)
def test_on_the_cpu(job: Job) -> None:
    check(job, "cpu", "copy", job(nullcontext(), "cpu"))


@pytest.mark.parametrize("job", CASES)
def test_on_a_device(fake: ModuleType, job: Job) -> None:
    fake.set_memory_policy(reuse_freed=True, poison_freed=True)
    check(job, "fake", "host", job(nullcontext(), "cpu"))


def test_a_write_in_backward_is_seen_by_nobody_else() -> None:
    check(written_to_in_backward, "cpu", "copy", [torch.full((SIZE, SIZE), 3.0)])


class Cell(nn.Module):
    """Takes parts of one storage that have a version counter each, and writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 2 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.unsafe_chunk(self.layer(x), 2, 1)
        return a.sigmoid_() * b.tanh_()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.LSTM, nn.GRU, Cell])
def test_parts_of_a_storage_with_version_counters_of_their_own(kind: Any) -> None:
    torch.manual_seed(0)
    model = Cell() if kind is Cell else kind(SIZE, SIZE)
    x = torch.randn(32, SIZE)
    if kind in (nn.LSTM, nn.GRU):
        x = x[None]

    def grads(context: Context) -> list[Tensor]:
        model.zero_grad()
        with context:
            out = model(x)
            while isinstance(out, tuple):
                out = out[0]
            out.square().sum().backward()
        return [grad_of(p).clone() for p in model.parameters()]

    plain = grads(nullcontext())
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    for _ in range(3):
        assert equal(grads(offload), plain)


def test_an_alias_with_a_counter_of_its_own() -> None:
    def grads(context: Context) -> list[Tensor]:
        x = leaf("cpu")
        with context:
            y = torch.full((SIZE, SIZE), 3.0)
            first = x * y
            y.data.mul_(2)  # which the counter of `y` does not see
            second = x * y.data
            (first + second).sum().backward()
        return [grad_of(x)]

    offload = tenure.Offload(target="copy", min_bytes=1)
    for step in range(3):
        # The first product was saved when it was 3: PyTorch's gradient has the 6 that came later.
        assert grads(offload)[0].unique().tolist() in ([9.0], [12.0])
        if step == 0:
            assert offload.stats().moved_out_storages == 2


def test_counting_operators_does_not_turn_it_off() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(SIZE, SIZE)
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    with FlopCounterMode(display=False), offload:
        model(torch.randn(32, SIZE)).tanh().sum().backward()
    assert offload.stats().moved_out_bytes > 0


def test_it_can_be_entered_again_when_hooks_were_forbidden() -> None:
    offload = tenure.Offload(target="copy", min_bytes=1)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        offload,
    ):
        pass
    with offload:
        (leaf("cpu") * 2).exp().sum().backward()
    assert offload.stats().moved_out_bytes > 0


@pytest.mark.parametrize("target", ["copy", "disk"])
@pytest.mark.parametrize("drops", [True, False])
def test_a_forked_child_may_end_with_one(tmp_path: Path, target: str, drops: bool) -> None:
    offload = tenure.Offload(target=target if target == "copy" else f"disk:{tmp_path}", min_bytes=1)
    with offload:
        (leaf("cpu") * 2).exp().sum().backward()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        if drops:
            del offload
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
