"""A pipeline of one rank on CUDA: gradients as of the whole model, and the allocator's figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn

import tenure
from tenure import pipelining


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)).cuda()
        for _ in range(count)
    ]


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("name", pipelining.schedule_names())
def test_it_trains_as_the_whole_model_within_its_bound(name: str) -> None:
    schedule = pipelining.schedule(name, ranks=1, microbatches=8)
    own, plain = stages(schedule.stages), nn.Sequential(*stages(schedule.stages))
    x, y = torch.randn(2048, 512, device="cuda"), torch.randn(2048, 512, device="cuda")
    pipe = tenure.Pipeline(own, name, microbatches=8, loss=mean, strict=True)
    levels = []
    for _ in range(5):
        for stage in own:
            stage.zero_grad()
        pipe.step(x, target=y)
        torch.cuda.synchronize()
        levels.append(torch.cuda.memory_allocated())
    assert levels[1:] == [levels[1]] * 4
    for one, target in zip(x.tensor_split(8), y.tensor_split(8), strict=True):
        mean(plain(one), target).backward(torch.tensor(1 / 8, device="cuda"))
    for ours, theirs in zip(nn.Sequential(*own).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    bound, stats = pipe.bound(), pipe.stats()
    assert (stats.in_flight, stats.waiting) == (bound.in_flight, bound.waiting)
    assert bound.bytes is not None
    assert stats.peak_bytes is not None
    # The allocator rounds each tensor up.
    assert 0.9 * bound.bytes <= stats.peak_bytes <= 1.1 * bound.bytes
