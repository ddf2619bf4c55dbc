"""What a stage returns and keeps: it may write to it for its next microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenure
from ranks import run_ranks
from tenure import pipelining

MICROBATCHES = 4
# Above the size of what goes as one with its header, which is copied anyway.
ROOM = (300, 300)


class Counting(nn.Module):
    """Returns a buffer that it adds to for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(ROOM))

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        return self.layer(x), self.count


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        self.seen.append(count.mean().item())
        return self.layer(x)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def read(rank: int, ranks: int, name: str) -> list[list[float]]:
    plan = pipelining.schedule(name, ranks, MICROBATCHES)
    own = plan.stages_of(rank)
    stages = [Reading() if number % 2 else Counting() for number in own]
    pipe = tenure.Pipeline(stages, plan, MICROBATCHES, loss=mean, timeout=30)
    x = torch.randn(2 * MICROBATCHES, 4)
    out = []
    for step in (pipe.step, pipe.eval) * 3:
        for stage in stages:
            if isinstance(stage, Reading):
                stage.seen.clear()
            else:
                stage.count.zero_()
        step(x, target=x)
        out += [list(stage.seen) for stage in stages if isinstance(stage, Reading)]
    return out


@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 2), ("1f1b", 2), ("looped-bfs", 1)])
def test_it_arrives_as_it_was(name: str, ranks: int) -> None:
    seen = [one for of_rank in run_ranks(read, ranks, name) for one in of_rank]
    assert seen == [[1.0, 2.0, 3.0, 4.0]] * 6


def evaluated(_rank: int, _ranks: int) -> Any:
    pipe = tenure.Pipeline(Counting(), "1f1b", MICROBATCHES, timeout=30)
    _, count = pipe.eval(torch.randn(MICROBATCHES, 4))
    return count[:: ROOM[0], 0].tolist()


def test_an_evaluation_returns_it_as_it_was_for_each_microbatch() -> None:
    assert run_ranks(evaluated, 1) == [[1.0, 2.0, 3.0, 4.0]]
