"""Offload on a real GPU: streams, pinned memory, the allocator's own figures."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tenure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    gc.collect()


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(*[Block(512) for _ in range(8)]).cuda()


def gradients(
    net: nn.Module, x: torch.Tensor, context: contextlib.AbstractContextManager[object]
) -> list[torch.Tensor]:
    net.zero_grad(set_to_none=True)
    with context:
        net(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def peak_of(
    net: nn.Module, x: torch.Tensor, context: contextlib.AbstractContextManager[object]
) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    net.zero_grad(set_to_none=True)
    with context:
        net(x).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("streams", [0, 1, 2])
def test_gradients_are_those_of_a_plain_step(net: nn.Module, streams: int) -> None:
    x = torch.randn(2048, 512, device="cuda")
    plain = gradients(net, x, contextlib.nullcontext())
    offload = tenure.Offload(net, streams=streams)
    for _ in range(5):
        assert same(plain, gradients(net, x, offload))
    assert offload.stats().mode == "planned"
    assert offload.stats().moved_out_bytes > 100 * MIB


def test_copies_that_are_late_and_memory_that_is_poisoned(net: nn.Module) -> None:
    """Every stream of the pool, the copy streams among them, is held up at random."""
    x = torch.randn(2048, 512, device="cuda")
    plain = gradients(net, x, contextlib.nullcontext())
    pool = [torch.cuda.Stream() for _ in range(32)]
    dice = random.Random(0)

    def disturb(*_: object) -> None:
        for stream in dice.sample(pool, 8):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(dice.randrange(1, 2_000_000))
        for _ in range(4):
            torch.full((dice.choice([1, 4, 16]) * MIB // 4,), float("nan"), device="cuda")

    for block in net:
        block.register_forward_hook(disturb)
        block.register_full_backward_hook(disturb)
    for budget in (None, int(0.6 * peak_of(net, x, contextlib.nullcontext()))):
        offload = tenure.Offload(net, budget=budget)
        for _ in range(15):
            assert same(plain, gradients(net, x, offload))


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_budget_holds_from_the_first_planned_step(net: nn.Module, share: float) -> None:
    x = torch.randn(4096, 512, device="cuda")
    gradients(net, x, contextlib.nullcontext())
    budget = int(share * peak_of(net, x, contextlib.nullcontext()))
    offload = tenure.Offload(net, budget=budget)
    peaks = [peak_of(net, x, offload) for _ in range(6)]
    assert max(peaks) <= budget


def test_five_views_have_one_copy_and_the_device_is_free_after_forward() -> None:
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            base = torch.ones(16 * MIB // 4, device="cuda")
            as_bytes = base.view(torch.uint8)[64:]
            views = [base, base[:MIB], base.view(torch.int32)[MIB:], as_bytes, base[5:]]
            ctx.save_for_backward(*views)
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            base, head, ints, bytes_, tail = ctx.saved_tensors
            assert base.sum().item() == base.numel()
            assert head.shape == (MIB,)
            assert ints.dtype == torch.int32
            assert bytes_.dtype == torch.uint8
            assert tail.storage_offset() == 5
            return gradient

    x = torch.ones(4, device="cuda", requires_grad=True)
    offload = tenure.Offload()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with offload:
        y = Keep.apply(x)
        torch.cuda.synchronize()
        offload.settle()
        assert torch.cuda.memory_allocated() - before < MIB
        y.sum().backward()
    assert offload.stats().moved_out_storages == 1


def test_retain_graph_and_double_backward(net: nn.Module) -> None:
    x = torch.randn(256, 512, device="cuda", requires_grad=True)

    def twice() -> list[torch.Tensor]:
        loss = net(x).square().mean()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x, create_graph=True)[0]
        return [first, second, torch.autograd.grad(second.square().sum(), x)[0]]

    plain = twice()
    offload = tenure.Offload(net)
    for _ in range(3):
        with offload:
            ours = twice()
        assert same(plain, ours)


def test_changing_shapes_and_exceptions_leave_nothing(net: nn.Module) -> None:
    dice = random.Random(1)
    offload = tenure.Offload(net)

    def step() -> None:
        x = torch.randn(dice.choice([256, 512, 1024]), 512, device="cuda")
        with contextlib.suppress(ZeroDivisionError), offload:
            loss = net(x).square().mean()
            if dice.random() < 0.2:
                raise ZeroDivisionError
            if dice.random() < 0.2:
                return
            loss.backward()
        net.zero_grad(set_to_none=True)

    levels = []
    for number in range(300):
        step()
        if number % 100 == 99:
            torch.cuda.synchronize()
            offload.settle()
            net.zero_grad(set_to_none=True)
            levels.append((torch.cuda.memory_allocated(), offload.stats().host_bytes))
    assert levels[0] == levels[1] == levels[2]
    assert levels[0][1] == 0


def test_no_call_of_a_step_waits_for_the_device(net: nn.Module) -> None:
    """The host runs a whole step ahead of a device that is asleep."""
    x = torch.randn(2048, 512, device="cuda")
    offload = tenure.Offload(net)
    for _ in range(4):
        gradients(net, x, offload)
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    asleep.record()
    net.zero_grad(set_to_none=True)
    with offload:
        net(x).square().mean().backward()
    assert not asleep.query()
    torch.cuda.synchronize()


def test_pinned_memory_is_what_is_held_and_is_taken_once(net: nn.Module) -> None:
    x = torch.randn(2048, 512, device="cuda")
    offload = tenure.Offload(net)
    for _ in range(2):
        gradients(net, x, offload)
    taken = offload.stats().slabs_taken
    for _ in range(10):
        gradients(net, x, offload)
    stats = offload.stats()
    assert stats.slabs_taken == taken
    assert stats.pinned_bytes <= 1.05 * stats.most_host_bytes


def test_compiled_backward_may_overwrite_what_it_is_given(net: nn.Module) -> None:
    x = torch.randn(512, 512, device="cuda")
    plain = gradients(net, x, contextlib.nullcontext())
    compiled = torch.compile(net)
    reference = gradients(compiled, x, contextlib.nullcontext())
    offload = tenure.Offload(net)
    for _ in range(4):
        assert same(reference, gradients(compiled, x, offload))
    for a, b in zip(plain, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
