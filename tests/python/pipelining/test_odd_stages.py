"""Stages out of the ordinary, in strict mode: their memory is known, their gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenure
from ranks import run_ranks
from tenure import pipelining

STEPS, MICROBATCHES = 5, 4


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


class Words(nn.Module):
    """Its gradient has the rows of words that came, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


class Passing(nn.Module):
    """Saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.up(x)))


class Bent(Cast):
    """Saves what it returns, so that the gradient of that takes as much again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x))


class Recomputed(Cast):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


def taught(kinds: list[type[nn.Module]], x: torch.Tensor) -> list[list[torch.Tensor]]:
    """The gradients of these stages, one after the other, of the same microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for kind in kinds))
    for one in x.chunk(MICROBATCHES):
        mean(model(one), torch.zeros(len(one), 8)).backward(torch.tensor(1 / MICROBATCHES))
    return [[p.grad for p in stage.parameters()] for stage in model]


def batch(kinds: list[type[nn.Module]]) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    if kinds[0] is Words:
        return torch.randint(100, (4 * MICROBATCHES,), generator=draw)
    return torch.randn(4 * MICROBATCHES, 8, generator=draw).requires_grad_()


def trained(
    rank: int, ranks: int, name: str, kinds: list[type[nn.Module]]
) -> dict[int, list[torch.Tensor]]:
    schedule = pipelining.schedule(name, ranks, MICROBATCHES, len(kinds) // ranks)
    torch.manual_seed(0)
    model = [kind() for kind in kinds]
    own = schedule.stages_of(rank)
    stages = [model[number] for number in own]
    pipe = tenure.Pipeline(stages, schedule, MICROBATCHES, loss=mean, strict=True, timeout=30)
    x = batch(kinds)
    for _ in range(STEPS):
        for stage in stages:
            stage.zero_grad()
        pipe.step(x, target=torch.zeros(len(x), 8))
    assert pipe.stats().peak_bytes <= pipe.bound().bytes + 2**12
    return {n: [p.grad for p in s.parameters()] for n, s in zip(own, stages, strict=True)}


def assert_right(name: str, kinds: list[type[nn.Module]], found: list[dict[int, Any]]) -> None:
    wanted = taught(kinds, batch(kinds))
    gradients = {number: of for result in found for number, of in result.items()}
    for number, of_stage in enumerate(wanted):
        for ours, theirs in zip(gradients[number], of_stage, strict=True):
            dense = [one.to_dense() for one in (ours, theirs)]
            torch.testing.assert_close(*dense, rtol=1e-5, atol=1e-7, msg=f"{name}, {number}")


CASES = {
    "sparse gradients": (2, "1f1b", [Words, Cast]),
    "sparse gradients in halves": (2, "zb-h1", [Words, Cast]),
    "gradients that go on within a rank": (1, "interleaved-1f1b", [Bent, Bent]),
    "the same in halves": (2, "zb-v", [Bent] * 4),
    "stages that save nothing": (2, "interleaved-1f1b", [Passing] * 4),
    "a backward within a backward": (2, "zb-h1", [Recomputed, Recomputed]),
}


@pytest.mark.parametrize("case", CASES)
def test_strict_knows_them(case: str) -> None:
    ranks, name, kinds = CASES[case]
    assert_right(name, kinds, run_ranks(trained, ranks, name, kinds))


def cast(rank: int, ranks: int, name: str) -> tuple[int, int]:
    stages = [Cast() for _ in pipelining.schedule(name, ranks, MICROBATCHES).stages_of(rank)]
    pipe = tenure.Pipeline(stages, name, MICROBATCHES, loss=mean, strict=True, timeout=30)
    x = torch.randn(4 * MICROBATCHES, 8)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, target=torch.zeros(len(x), 8))
    return pipe.bound().bytes, pipe.stats().steps


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v"])
def test_under_autocast_no_copy_of_a_weight_stays_for_the_callers_block(name: str) -> None:
    for bound, steps in run_ranks(cast, 2, name):
        assert steps == STEPS
        assert bound > 0


class Switched(Cast):
    """Takes more when it is told to, when it trains, and where its first layer learns."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        x = torch.sin(self.noise(torch.cos(x)))
        return super().forward(super().forward(x) if twice else x)


def switched(_rank: int, _ranks: int, what: str) -> int:
    stage = Switched()
    stage.eval()
    stage.up.weight.requires_grad_(False)
    pipe = tenure.Pipeline(stage, "1f1b", MICROBATCHES, loss=mean, strict=True, timeout=30)
    x = torch.randn(64 * MICROBATCHES, 8)
    for step in range(2 * STEPS):
        more = step >= STEPS
        stage.train(more and what == "training")
        stage.up.weight.requires_grad_(more and what == "a weight that learns")
        pipe.step(x, target=torch.zeros(len(x), 8), twice=more and what == "an argument")
    return pipe.stats().steps


@pytest.mark.parametrize("what", ["training", "a weight that learns", "an argument"])
def test_what_a_switch_adds_is_another_bound(what: str) -> None:
    assert run_ranks(switched, 2, what) == [2 * STEPS] * 2


def compiled(rank: int, ranks: int, name: str) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    model = [Bent() for _ in range(ranks)]
    stage = torch.compile(model[rank], backend="aot_eager")
    pipe = tenure.Pipeline(stage, name, MICROBATCHES, loss=mean, strict=True, timeout=60)
    x = batch([Bent])
    for _ in range(STEPS):
        model[rank].zero_grad()
        pipe.step(x, target=torch.zeros(len(x), 8))
    return [p.grad for p in model[rank].parameters()]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_compiled_stages(name: str) -> None:
    """What they have saved they may write to, which torch allows in a whole backward alone."""
    found = run_ranks(compiled, 2, name, timeout=120)
    wanted = taught([Bent, Bent], batch([Bent]))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
