"""Sharded models on an accelerator: streams, pieces on the host, compiled graphs. One rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn

import tenure

WIDTH = 256


def model_of(blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    made = [
        nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        for _ in range(blocks)
    ]
    return nn.Sequential(*made).cuda()


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(run: nn.Module, model: nn.Module, steps: int = 8) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = torch.Generator("cuda").manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(64, WIDTH, device="cuda", generator=made)
        loss = (run(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_trains_as_the_plain_model() -> None:
    plain = model_of()
    sharded = tenure.shard(copy.deepcopy(plain))
    assert losses(sharded, sharded) == pytest.approx(losses(plain, plain), rel=1e-5)
    units = sharded.tenure.stats().units
    # The last block is needed again at once, so it stays for backward.
    assert [unit.gathers for unit in units if unit.bytes] == [16, 16, 16, 9]
    assert sharded.tenure.stats().gathered_bytes == 0


def test_pieces_on_the_host() -> None:
    plain = model_of()
    sharded = tenure.shard(copy.deepcopy(plain), offload=True)
    for piece in sharded.parameters():
        assert piece.device.type == "cpu"
        assert piece.is_pinned()
    before = torch.cuda.memory_allocated()
    assert losses(sharded, sharded) == pytest.approx(losses(plain, plain), rel=1e-4)
    # Nothing of it stays on the device: neither pieces nor gradients nor the optimizer's state.
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    of_plain = sum(3 * p.nbytes for p in plain.parameters())  # gradients are gone, Adam's is not
    assert grown <= of_plain
    assert all(not p.grad.is_cuda for p in sharded.parameters() if p.grad is not None)


def test_low_precision_on_the_host() -> None:
    sharded = tenure.shard(
        model_of(), offload=True, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    with torch.autocast("cuda", torch.bfloat16):
        found = losses(sharded, sharded, 20)
    assert found[-1] < found[0]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_compiled(prefetch: int) -> None:
    torch.compiler.reset()
    plain = model_of()
    sharded = tenure.shard(copy.deepcopy(plain), prefetch=prefetch)
    run = torch.compile(sharded, backend=tenure.sharding.backend("inductor"), fullgraph=True)
    expected = losses(torch.compile(plain), plain)
    assert losses(run, sharded) == pytest.approx(expected, rel=1e-3)
    assert [graph.kind for graph in sharded.tenure.graphs] == ["forward", "backward"]
    assert not any(graph.why for graph in sharded.tenure.graphs)
    stats = sharded.tenure.stats()
    assert stats.gathered_bytes == 0
    unit = max(unit.bytes for unit in stats.units)
    assert stats.peak_gathered_bytes <= (1 + prefetch) * unit


def test_released_memory_is_free_for_others() -> None:
    sharded = tenure.shard(model_of(16), prefetch=0)
    x = torch.randn(8, WIDTH, device="cuda")
    with torch.no_grad():
        sharded(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        sharded(x)
    torch.cuda.synchronize()
    unit = max(unit.bytes for unit in sharded.tenure.stats().units)
    assert torch.cuda.max_memory_allocated() - before < 2 * unit
    view = sharded[0][1].weight.T
    with pytest.raises(RuntimeError, match="UseAfterRelease"):
        view.sum().item()
