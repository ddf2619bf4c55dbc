"""Host memory: as much as is held, taken once, given back when shapes shrink and at the end."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tenure
from offloading import Keep, batch, blocks, drop_graphs, equal, gradients, side_streams

Fake = ModuleType

streams = pytest.mark.parametrize("streams", [0, 1, 2])


def inputs(rows: int) -> Tensor:
    return batch(rows, width=32, device="fake")


def step(offload: tenure.Offload, model: torch.nn.Module, rows: int) -> tenure.OffloadStats:
    gradients(model, inputs(rows), offload)
    drop_graphs()
    return offload.stats()


@pytest.fixture
def model(fake: Fake) -> torch.nn.Module:
    del fake
    return blocks(layers=12, width=32, device="fake")


@streams
@pytest.mark.parametrize("rows", [100, 777, 1024])
def test_it_takes_what_it_holds(model: torch.nn.Module, streams: Any, rows: int) -> None:
    offload = tenure.Offload(model, streams=streams, min_bytes=1)
    for _ in range(6):
        stats = step(offload, model, rows)
        assert stats.most_host_bytes <= stats.pinned_bytes <= 1.05 * stats.most_host_bytes


@streams
def test_stable_shapes_take_nothing_more_after_the_second_step(
    model: torch.nn.Module, streams: Any
) -> None:
    offload = tenure.Offload(model, streams=streams)
    taken = [step(offload, model, 500).slabs_taken for _ in range(12)]
    assert taken[0] > 0
    assert taken[1:] == [taken[1]] * 11


@streams
@pytest.mark.parametrize("behind", [False, True], ids=["device in time", "device behind"])
def test_it_shrinks_when_shapes_do(
    fake: Fake, model: torch.nn.Module, streams: Any, behind: bool
) -> None:
    before = fake.pinned_bytes()
    offload = tenure.Offload(model, streams=streams, min_bytes=1)
    for rows in (1000, 700, 300, 1000, 900, 800):  # cuts the memory into pieces of many sizes
        most = step(offload, model, rows)
    x = inputs(400)
    for _ in range(9):
        for stream in [*side_streams(fake), torch.accelerator.current_stream()] if behind else []:
            fake.hold(stream)
        model.zero_grad()
        with offload:
            model(x).square().sum().backward()
        torch.accelerator.synchronize()
    least = offload.stats()
    assert least.most_host_bytes < most.most_host_bytes / 1.5
    assert least.pinned_bytes <= 1.05 * least.most_host_bytes
    assert fake.pinned_bytes() - before == least.pinned_bytes


@pytest.mark.parametrize("host_full", ["keep", "raise"])
def test_a_limit(fake: Fake, model: torch.nn.Module, host_full: Any) -> None:
    x = inputs(1000)
    plain = gradients(model, x)
    before = fake.pinned_bytes()
    offload = tenure.Offload(model, host_limit="1MB", host_full=host_full, min_bytes=1)
    for _ in range(3):
        if host_full == "raise":
            with pytest.raises(tenure.BudgetError, match="host limit is .*: raise host_limit"):
                gradients(model, x, offload)
        else:
            assert equal(gradients(model, x, offload), plain)
            assert offload.stats().kept["host limit reached"][1] > 0
            assert 0 < offload.stats().moved_out_bytes <= 10**6
        assert fake.pinned_bytes() - before <= 10**6
    model.zero_grad()
    assert equal(gradients(model, x), plain), "the model is as it was"


def test_all_is_given_back_at_the_end(fake: Fake, model: torch.nn.Module) -> None:
    before = fake.pinned_bytes()
    offload = tenure.Offload(model)
    step(offload, model, 500)
    assert fake.pinned_bytes() > before
    del offload
    drop_graphs()
    assert fake.pinned_bytes() == before


def test_a_graph_may_outlive_its_offload(fake: Fake, model: torch.nn.Module) -> None:
    x = inputs(32)
    plain = gradients(model, x)
    model.zero_grad()
    before = fake.pinned_bytes()
    with tenure.Offload(model, min_bytes=1):
        loss = model(x).square().sum()
    assert fake.pinned_bytes() > before
    loss.backward()
    assert equal([p.grad.cpu() for p in model.parameters() if p.grad is not None], plain)
    del loss
    drop_graphs()
    assert fake.pinned_bytes() == before


def test_memory_goes_back_when_the_last_copy_from_it_is_done(fake: Fake) -> None:
    """The graph and the Offload end while backward's copy is queued; its result is still wanted."""
    fake.set_memory_policy(reuse_freed=True)
    found: list[Tensor] = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
            ctx.save_for_backward(saved)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
            del grads
            found.extend(ctx.saved_tensors)
            return None, None

    x = torch.ones(1, device="fake", requires_grad=True)
    grad = torch.ones(1, device="fake")
    offload = tenure.Offload(min_bytes=1)
    with offload:  # takes one slab
        Keep.apply(x, [], torch.zeros(4096, device="fake"))
    with offload:  # uses two pieces of it, and asks for the second alone
        first = Keep.apply(x, [], torch.zeros(1024, device="fake"))
        second = Ask.apply(x, torch.full((1024,), 3.0, device="fake"))
        torch.accelerator.synchronize()
        offload.settle()
        for stream in side_streams(fake):
            fake.hold(stream)
        second.backward(grad)
    del first, second, offload
    torch.full((4096,), 5.0).pin_memory()
    torch.accelerator.synchronize()
    assert set(found[0].tolist()) == {3.0}


@pytest.mark.parametrize("target", ["host", "copy"])
def test_one_large_storage_that_becomes_smaller(fake: Fake, target: str) -> None:
    """The room of the large one is not kept for half of it."""
    del fake
    device = "cpu" if target == "copy" else "fake"
    offload = tenure.Offload(target=target, min_bytes=1)
    for size in [64] * 3 + [36] * 24:
        x = torch.ones(1, device=device, requires_grad=True)
        with offload:
            y = Keep.apply(x, [], torch.ones(size << 18, device=device))
            y = Keep.apply(y, [], torch.ones(size << 14, device=device))
            y.sum().backward()
        del x, y
        drop_graphs()
    stats = offload.stats()
    assert stats.most_host_bytes <= stats.pinned_bytes <= 1.05 * stats.most_host_bytes
