"""Sharded training is data-parallel training: the same losses, gradients and parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tenure

STEPS = 6


class Block(nn.Module):
    """A residual block with an odd number of elements in nearly every parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x)))) + self.none.sum()


class Net(nn.Module):
    """Tied ends, a frozen part, blocks in a list."""

    def __init__(self, *, width: int = 17, words: int = 31, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = ""
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            if self.recompute:
                reentrant = self.recompute == "reentrant"
                h = checkpoint(block, h, use_reentrant=reentrant)
            else:
                h = block(h)
        if self.again:
            h = self.blocks[0](h)
        return self.head(self.frozen(h))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batch_of(rank: int, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(31, (4, 9), generator=made)


def data_parallel_step(model: nn.Module, batch: torch.Tensor) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return loss.item()


def norm_of(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def train(rank: int, world: int, how: dict[str, Any]) -> list[tuple[float, float, float, float]]:
    """Losses and norms of both, step by step."""
    torch.manual_seed(0)
    plain = Net(again=how.pop("again", False))
    plain.recompute = how.pop("recompute", "")
    sharded = tenure.shard(copy.deepcopy(plain), **how)
    ours = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        batch = batch_of(rank, step)
        loss = loss_of(sharded, batch)
        loss.backward()
        other = data_parallel_step(plain, batch)
        norms = norm_of(sharded), norm_of(plain)
        found.append((loss.item(), other, *norms))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        gathered = sharded.tenure.stats().gathered_bytes
        assert gathered == 0, gathered
    assert all(p.numel() <= q.numel() for p, q in zip(sharded.parameters(), plain.parameters()))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"prefetch": 0},
        {"reshard_after_forward": False, "prefetch": 2},
        {"units": ["blocks.0", "blocks.2"], "again": True},
        {"recompute": "reentrant"},
        {"recompute": "plain"},
    ],
    ids=["", "no-prefetch", "kept", "some", "reentrant", "checkpoint"],
)
def test_it_is_data_parallel_training(world: int, how: dict[str, Any]) -> None:
    for rank in run_ranks(train, world, how):
        for ours, theirs, norm, other in rank:
            if world < 3:  # of three, the order of a sum is the backend's
                assert ours == theirs
            assert ours == pytest.approx(theirs, rel=1e-6)
            assert norm == pytest.approx(other, rel=1e-5)
