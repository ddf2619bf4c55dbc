"""Pipelines beside the other parts: sharded stages, offloaded and recomputed activations."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenure
from ranks import run_ranks

BOTH = ["1f1b", "zb-h1"]
WAYS = ["recomputed", "offloaded", "accumulated"]


class Block(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(8, 32), nn.Linear(32, 8), recompute

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def model(recompute: bool = False) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(recompute), Block(recompute)) for _ in range(2)]


def data(replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(replica)
    return torch.randn(16, 8, generator=draw), torch.randn(16, 8, generator=draw)


def whole(replicas: int) -> list[list[torch.Tensor]]:
    """Gradients by stage: the mean over replicas, each over four microbatches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stages = model()
    for replica in range(replicas):
        x, y = data(replica)
        for one, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            loss = mean(stages[1](stages[0](one)), target)
            loss.backward(torch.tensor(0.25 / replicas))
    torch.set_num_threads(threads)
    return [[p.grad for p in stage.parameters()] for stage in stages]


def sharded(rank: int, _ranks: int) -> dict[str, list[torch.Tensor]]:
    """Ranks 0 and 1 are the stages of one replica, 2 and 3 of another."""
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, number = divmod(rank, 2)
    return {
        name: sharded_step(name, replica, pipes[replica], number, pairs[number]) for name in BOTH
    }


def sharded_step(
    schedule: str, replica: int, pipes: Any, number: int, pairs: Any
) -> list[torch.Tensor]:
    stage = model()[number]
    tenure.shard(stage, pairs, units=[Block])
    pipe = tenure.Pipeline(stage, schedule, 4, pipes, mean, timeout=30)
    x, y = data(replica)
    for _ in range(2):
        for parameter in stage.parameters():
            parameter.grad = None
        pipe.step(x, target=y)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
    before = stage.tenure.full_state_dict()
    optimizer.step()
    after = stage.tenure.full_state_dict()
    return [before[name] - after[name] for name in before]


@cache
def results(fn: Any, ranks: int) -> list[Any]:
    """One start of the ranks for all that is tried on them."""
    return run_ranks(fn, ranks, timeout=60)


@pytest.mark.parametrize("schedule", BOTH)
def test_sharded_stages(schedule: str) -> None:
    found = results(sharded, 4)
    for number, wanted in enumerate(whole(2)):
        for ours, theirs in zip(found[number][schedule], wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def beside(rank: int, _ranks: int) -> dict[tuple[str, str], list[torch.Tensor]]:
    return {(how, name): one_way(rank, how, name) for how in WAYS for name in BOTH}


def one_way(rank: int, how: str, schedule: str) -> list[torch.Tensor]:
    stage = model(recompute=how == "recomputed")[rank]
    pipe = tenure.Pipeline(stage, schedule, 4, loss=mean, timeout=30)
    x, y = data(0)
    for _ in range(3):
        stage.zero_grad()
        if how == "offloaded":
            with tenure.Offload(stage):
                pipe.step(x, target=y)
        elif how == "accumulated":
            for half, other in zip(x.chunk(2), y.chunk(2), strict=True):
                pipe.step(half, target=other)
        else:
            pipe.step(x, target=y)
    return [p.grad for p in stage.parameters()]


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("how", WAYS)
def test_other_ways_to_keep_activations(how: str, schedule: str) -> None:
    found = results(beside, 2)
    factor = 2 if how == "accumulated" else 1
    for number, wanted in enumerate(whole(1)):
        for ours, theirs in zip(found[number][how, schedule], wanted, strict=True):
            torch.testing.assert_close(ours / factor, theirs, rtol=1e-5, atol=1e-6)
