"""Pipelines beside the other parts: sharded stages, offloaded and recomputed activations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenure
from ranks import run_ranks
from tenure import _C

BOTH = ["1f1b", "zb-h1"]
WAYS = ["recomputed", "offloaded", "accumulated"]


class Block(nn.Module):
    def __init__(self, recompute: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(8, 32), nn.Linear(32, 8), recompute
        self.reentrant, self.calls = reentrant, 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=self.reentrant)
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


@dataclass
class Figures:
    """What a step did with the units of a rank's stages."""

    gathers: set[int]
    reduces: set[int]
    gathered_bytes: int


def figures(stages: list[nn.Module]) -> dict[str, tuple[int, int]]:
    found = {}
    for number, stage in enumerate(stages):
        for unit in stage.tenure.stats().units:
            if unit.bytes:
                found[f"{number} {unit.name}"] = (unit.gathers, unit.reduces)
    return found


def figures_of(stages: list[nn.Module], step: Callable[[], object]) -> Figures:
    before = figures(stages)
    step()
    after = figures(stages)
    return Figures(
        {after[name][0] - before[name][0] for name in after},
        {after[name][1] - before[name][1] for name in after},
        sum(stage.tenure.stats().gathered_bytes for stage in stages),
    )


class Replicas:
    """Ranks 0 and 1 are the stages of one replica, 2 and 3 of another."""

    def __init__(self, rank: int) -> None:
        pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.replica, self.number = divmod(rank, 2)
        self.pipe, self.pair = pipes[self.replica], pairs[self.number]

    def sharded(self, stage: nn.Module) -> nn.Module:
        return tenure.shard(stage, self.pair, units=[Block])

    def pipeline(self, stage: Any, schedule: str, **settings: Any) -> tenure.Pipeline:
        return tenure.Pipeline(stage, schedule, 4, self.pipe, mean, timeout=30, **settings)


def applied(stage: nn.Module) -> list[torch.Tensor]:
    """The gradients of a sharded stage, as an optimizer applies them, whole."""
    before = stage.tenure.full_state_dict()
    torch.optim.SGD(stage.parameters(), lr=1.0).step()
    after = stage.tenure.full_state_dict()
    stage.load_state_dict(before)
    stage.zero_grad()
    return [before[name] - after[name] for name in before]


def sharded(rank: int, _ranks: int) -> dict[tuple[str, bool], Any]:
    replicas = Replicas(rank)
    return {
        (name, stays): sharded_steps(replicas, name, stays)
        for name in BOTH
        for stays in (True, False)
    }


def sharded_steps(
    replicas: Replicas, schedule: str, stays: bool
) -> tuple[list[torch.Tensor], list[Figures], Figures, torch.Tensor | None]:
    stage = replicas.sharded(model()[replicas.number])
    settings = {"strict": True} if stays else {"stay_gathered": False}
    pipe = replicas.pipeline(stage, schedule, **settings)
    x, y = data(replicas.replica)
    steps = []
    for _ in range(3):
        stage.zero_grad()
        steps.append(figures_of([stage], lambda: pipe.step(x, target=y)))
    gradients = applied(stage)
    made = []
    evaluation = figures_of([stage], lambda: made.append(pipe.eval(x)))
    return gradients, steps, evaluation, made[0]


@cache
def results(fn: Any, ranks: int) -> list[Any]:
    """One start of the ranks for all that is tried on them."""
    return run_ranks(fn, ranks, timeout=60)


def assert_whole(found: list[list[torch.Tensor]], replicas: int = 2) -> None:
    """Gradients by stage are those of the whole model."""
    for number, wanted in enumerate(whole(replicas)):
        for ours, theirs in zip(found[number], wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("schedule", BOTH)
def test_sharded_stages(schedule: str, stays: bool) -> None:
    assert_whole([result[schedule, stays][0] for result in results(sharded, 4)])


@pytest.mark.parametrize("schedule", BOTH)
def test_sharded_stages_are_gathered_and_added_up_once_a_step(schedule: str) -> None:
    for result in results(sharded, 4):
        _, steps, evaluation, _ = result[schedule, True]
        assert steps == [Figures({1}, {1}, 0)] * 3
        assert evaluation == Figures({1}, {0}, 0)


@pytest.mark.parametrize("schedule", BOTH)
def test_sharded_stages_that_do_not_stay_gathered(schedule: str) -> None:
    for result in results(sharded, 4):
        _, steps, _, _ = result[schedule, False]
        assert all(min(step.gathers) >= 4 and step.reduces == {4} for step in steps)


def test_evaluation_of_sharded_stages() -> None:
    stages = model()
    for rank, result in enumerate(results(sharded, 4)):
        x, _ = data(rank // 2)
        wanted = stages[1](stages[0](x)) if rank % 2 == 1 else None
        for _, _, _, made in result.values():
            assert (made is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(made, wanted)


def refused(_rank: int, _ranks: int) -> str:
    stage = tenure.shard(Block())
    try:
        tenure.Pipeline(stage, loss=mean, strict=True, stay_gathered=False)
    except tenure.InputError as error:
        return str(error)
    return "nothing"


def test_the_bound_knows_only_stages_that_stay_gathered() -> None:
    assert "stay gathered" in run_ranks(refused, 1)[0]


def interrupted(
    rank: int, _ranks: int
) -> tuple[str, list[str], int, int, Figures, list[torch.Tensor]]:
    """The last stages of both replicas fail in the second step."""
    replicas = Replicas(rank)
    meter = _C.HostMeter()
    stage = replicas.sharded(model()[replicas.number])
    pipe = replicas.pipeline(stage, "1f1b", strict=True)
    x, y = data(replicas.replica)
    pipe.step(x, target=y)
    stage.zero_grad()
    level, _ = meter.read()
    if replicas.number == 1:
        pipe.loss = fail_at(3)
    try:
        pipe.step(x, target=y)
    except (RuntimeError, tenure.CollectiveError) as error:
        said, notes = str(error), getattr(error, "__notes__", [])
    pipe.loss = mean
    left = meter.read()[0] - level
    gathered = stage.tenure.stats().gathered_bytes
    step = figures_of([stage], lambda: pipe.step(x, target=y))
    return said, notes, left, gathered, step, applied(stage)


def fail_at(call: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    calls = iter(range(1, 100))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if next(calls) == call:
            raise RuntimeError("in the third microbatch")
        return mean(output, target)

    return loss


def test_a_step_of_sharded_stages_that_fails_leaves_nothing() -> None:
    found = run_ranks(interrupted, 4, timeout=60)
    for said, _, left, gathered, step, _ in found:
        assert "in the third microbatch" in said
        assert left <= 0, "a failed step leaves memory"
        assert gathered == 0
        assert step == Figures({1}, {1}, 0)
    assert_whole([gradients for *_, gradients in found])
    assert found[1][1][0].startswith("rank 1, in the ")
    assert found[3][1][0].startswith("rank 3 (rank 1 of the pipeline), in the ")


def several(rank: int, _ranks: int) -> tuple[list[int], Figures, list[torch.Tensor]]:
    """Two stages a rank, which are parts of one sharded module."""
    replicas = Replicas(rank)
    blocks = [block for stage in model() for block in stage]
    own = tenure.pipelining.schedule("zb-v", 2, 4).stages_of(replicas.number)
    stages = nn.ModuleList(blocks[number] for number in own)
    replicas.sharded(stages)
    pipe = replicas.pipeline(list(stages), "zb-v", strict=True)
    x, y = data(replicas.replica)
    for _ in range(2):
        stages.zero_grad()
        step = figures_of([stages], lambda: pipe.step(x, target=y))
    return own, step, applied(stages)


def test_stages_of_one_sharded_module() -> None:
    found = run_ranks(several, 4, timeout=60)
    wanted = [gradient for stage in whole(2) for gradient in stage]  # four of each block
    for own, step, gradients in found:
        assert step == Figures({1}, {1}, 0)
        theirs = [one for number in own for one in wanted[4 * number : 4 * number + 4]]
        for ours, one in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-6)


def recomputed(rank: int, _ranks: int, reentrant: bool) -> tuple[int, list[torch.Tensor]]:
    stage = model()[rank]
    for block in stage:
        block.recompute, block.reentrant = True, reentrant
    pipe = tenure.Pipeline(stage, "1f1b", 4, loss=mean, timeout=30)
    x, y = data(0)
    pipe.step(x.requires_grad_(), target=y)
    return sum(block.calls for block in stage), [p.grad for p in stage.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_backward_recomputes_once(reentrant: bool) -> None:
    found = run_ranks(recomputed, 2, reentrant)
    assert [calls for calls, _ in found] == [16, 16]  # 2 blocks, 4 microbatches, twice
    assert_whole([gradients for _, gradients in found], 1)


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


@dataclass
class Moves:
    """What an Offload did with the activations of one step."""

    mode: str
    saved: tuple[int, int]
    out: tuple[int, int]
    back: tuple[int, int]
    kept: dict[str, int]
    promised: int

    @classmethod
    def of(cls, offload: tenure.Offload) -> Moves:
        stats = offload.stats()
        return cls(
            stats.mode,
            (stats.saved_storages, stats.saved_bytes),
            (stats.moved_out_storages, stats.moved_out_bytes),
            (stats.moved_in_storages, stats.moved_in_bytes),
            # Not their bytes: what was received may have the front of a header in its storage.
            {why: storages for why, (storages, _) in stats.kept.items()},
            stats.promised,
        )


def planned(rank: int, _ranks: int) -> dict[str, tuple[list[Moves], list[torch.Tensor]]]:
    return {name: planned_steps(rank, name) for name in BOTH}


def planned_steps(rank: int, schedule: str) -> tuple[list[Moves], list[torch.Tensor]]:
    """Nine steps; an evaluation comes after the fourth, and a step that fails after the sixth."""
    stage = model()[rank]
    pipe = tenure.Pipeline(stage, schedule, 4, loss=mean, timeout=30)
    offload = tenure.Offload(stage, target="copy", min_bytes=1)
    x, y = data(0)
    steps = []
    for number in range(9):
        stage.zero_grad()
        with offload:
            pipe.step(x, target=y)
        steps.append(Moves.of(offload))
        if number == 3:
            with offload:
                pipe.eval(x)
        if number == 5:
            pipe.loss = fail_at(3) if rank == 1 else mean
            with suppress(RuntimeError), offload:
                pipe.step(x, target=y)
            pipe.loss = mean
    return steps, [p.grad for p in stage.parameters()]


@pytest.mark.parametrize("schedule", BOTH)
def test_the_plan_of_an_offload_holds_for_every_step_of_a_schedule(schedule: str) -> None:
    """Saves come in the schedule's order, so each of a microbatch's has its place in the plan."""
    found = results(planned, 2)
    for number, wanted in enumerate(whole(1)):
        steps, gradients = found[number][schedule]
        assert steps[1].mode == "planned"
        assert steps[1].out >= (4, 0), "something of each microbatch moves"
        assert steps[1].back >= steps[1].out  # what both halves of a backward need comes twice
        assert steps[2:] == steps[1:2] * 7
        for ours, theirs in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


ELSEWHERE = ["all", "budget", "fit"]


class Wide(nn.Module):
    """Saves much more than it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4096), nn.Linear(4096, 8)
        self.kept: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(torch.tanh(torch.sigmoid(self.up(x))))
        if self.kept is not None:
            self.kept.append(made)
        return made


def elsewhere(how: str, stage: Wide, rank: int) -> Any:
    if how == "fit":
        return tenure.Fit(stage, budget=["6MiB", "10MiB"][rank])
    budget = "3MiB" if how == "budget" else None
    return tenure.Offload(stage, target="copy", min_bytes=1, budget=budget)


@dataclass
class Strict:
    """What a strict pipeline promised and measured, and what it said of a stage that kept."""

    bound: int
    peak: int
    said: str


def strictly(rank: int, _ranks: int) -> dict[tuple[str, str], Strict]:
    return {
        (how, name): strict_steps(rank, how, name) for how in ["plain", *ELSEWHERE] for name in BOTH
    }


def strict_steps(rank: int, how: str, schedule: str) -> Strict:
    stage = Wide()
    pipe = tenure.Pipeline(stage, schedule, 4, loss=mean, strict=True, timeout=30)
    context = elsewhere(how, stage, rank) if how != "plain" else torch.enable_grad()
    x, y = (one.repeat(16, 1) for one in data(0))
    for _ in range(6):
        stage.zero_grad()
        with context:
            pipe.step(x, target=y)
    found = Strict(pipe.bound().bytes, pipe.stats().peak_bytes, "nothing")
    stage.kept = [] if rank == 0 else None
    try:
        with context:
            pipe.step(x, target=y)
    except tenure.BudgetError as error:
        found.said = str(error)
    except tenure.CollectiveError:
        found.said = "the other"
    return found


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("how", ELSEWHERE)
def test_what_is_elsewhere_counts_as_if_it_were_there(how: str, schedule: str) -> None:
    for rank, result in enumerate(results(strictly, 2)):
        plain, ours = result["plain", schedule], result[how, schedule]
        assert ours.bound == plain.bound
        assert ours.peak < plain.peak or rank == 1, "the last rank's may all fit"
        assert ("rank 0 of the pipeline" in ours.said) is (rank == 0), ours.said
