"""The bound holds: the allocator gives out what the schedule promises, and none of it stays."""

from __future__ import annotations

import gc
import math
import re
import threading
import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tenure
from ranks import run_ranks
from tenure import _C, pipelining

SCHEDULES = pipelining.schedule_names()
MICROBATCHES, ROWS = 8, 4


class Wide(nn.Module):
    """Keeps a thousand times what it passes on, so that microbatches are what is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8192), nn.Linear(8192, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.up(x)))


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def lone_forward() -> int:
    """Bytes that a microbatch leaves on a stage, from a forward outside of any schedule."""
    meter, stage = _C.HostMeter(), Wide()
    x = torch.randn(ROWS, 8, requires_grad=True)
    before, _ = meter.read()
    made = stage(x)
    bytes_of_it = meter.read()[0] - before
    del made
    return bytes_of_it


def measured(rank: int, ranks: int) -> dict[str, tuple[tenure.pipelining.Bound, Any, int]]:
    whole, out = lone_forward(), {}
    x, y = torch.randn(ROWS * MICROBATCHES, 8), torch.randn(ROWS * MICROBATCHES, 8)
    for name in SCHEDULES:
        schedule = pipelining.schedule(name, ranks, MICROBATCHES)
        stages = [Wide() for _ in schedule.stages_of(rank)]
        pipe = tenure.Pipeline(stages, name, MICROBATCHES, loss=mean, strict=True, timeout=30)
        for _ in range(3):
            for stage in stages:
                stage.zero_grad()
            pipe.step(x, target=y)
        out[name] = pipe.bound(), pipe.stats(), whole
    return out


@cache
def results(ranks: int) -> list[dict[str, Any]]:
    return run_ranks(measured, ranks, timeout=90)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_peak_is_the_bound(name: str, ranks: int) -> None:
    schedule = pipelining.schedule(name, ranks, MICROBATCHES)
    for rank, result in enumerate(results(ranks)):
        bound, stats, whole = result[name]
        promised = schedule.bound(rank)
        assert (stats.in_flight, stats.waiting) == (promised.in_flight, promised.waiting)
        # The lone forward knows the whole. What waits for its weights is the inputs of products and
        # the gradients of their outputs: here one and one of what the forward kept one of.
        waiting = [waits for _, waits in bound.microbatch_bytes]
        assert all(0 <= waits <= 2.05 * whole for waits in waiting)
        least = schedule.peak_bytes(rank, [(whole, waits) for waits in waiting])
        assert math.isclose(stats.peak_bytes, least, rel_tol=0.02), (rank, stats, least)


def many_steps(rank: int, _ranks: int) -> list[int]:
    meter, stage = _C.HostMeter(), Wide()
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
    pipe = tenure.Pipeline(stage, "1f1b", 4, loss=mean, strict=True, timeout=30)
    levels = []
    for step in range(300):
        rows = ROWS * 4 - step % 3  # the last microbatches are smaller at times
        pipe.step(torch.randn(rows, 8), target=torch.randn(rows, 8))
        optimizer.step()
        optimizer.zero_grad()
        levels.append(meter.read()[0])
    assert rank == pipe.rank
    return levels


def test_300_steps_end_where_they_began() -> None:
    for levels in run_ranks(many_steps, 2, timeout=90):
        assert set(levels[3:]) == {levels[3]}


def left_behind(rank: int, _ranks: int) -> str:
    kept: list[torch.Tensor] = []

    class Keeping(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            if rank == 0:
                kept.append(made)
            return made

    pipe = tenure.Pipeline(Keeping(), "1f1b", 4, loss=mean, strict=True, timeout=30)
    x = torch.randn(ROWS * 4, 8)
    said = "nothing"
    for _ in range(3):
        try:
            pipe.step(x, target=x)
        except tenure.BudgetError as error:
            said = str(error)
            break
        except tenure.CollectiveError:
            break
    return said


def test_a_stage_that_keeps_its_outputs_is_told_of() -> None:
    first, _ = run_ranks(left_behind, 2)
    assert "rank 0" in first
    assert "microbatches" in first


class Telling(Wide):
    """Says when it has a microbatch; or waits until the other has the last, and counts outputs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0
        self.said = dist.distributed_c10d._get_default_store()
        self.on_the_way: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owners = tenure.ledger().by_owner()
        self.on_the_way.append(
            sum(of.leases for owner, of in owners.items() if owner.name == "output of stage 0")
        )
        if self.rank == 1:
            self.said.set(f"has {self.calls}", "")
        elif self.calls > 0:
            self.said.wait([f"has {self.calls - 1}"])
            time.sleep(0.1)  # it is read there; that it has left here may be known a little later
        self.calls += 1
        return super().forward(x)


def sent(rank: int, _ranks: int) -> list[int]:
    stage = Telling(rank)
    pipe = tenure.Pipeline(stage, "gpipe", 6, loss=mean, strict=True, timeout=30)
    x = torch.randn(ROWS * 6, 8)
    pipe.step(x, target=x)
    return stage.on_the_way


def test_an_output_goes_as_soon_as_it_is_sent() -> None:
    """Not when its microbatch ends, and not when the room is needed for another one."""
    first, _ = run_ranks(sent, 2)
    assert max(first) == 1, first


class Hoarding(Wide):
    """A stage that keeps as much as it is told to, and one thing for each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.masks: dict[int, torch.Tensor] = {}
        self.more = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.masks.setdefault(len(x), torch.ones(len(x)))
        if self.more:
            self.kept.append(torch.ones(self.more))
        return super().forward(x)


def told_of(rank: int, _ranks: int, case: str) -> tuple[str, int]:
    """What is said, and after how many steps."""
    stage = Hoarding()
    pipe = tenure.Pipeline(stage, "1f1b", 2, loss=mean, strict=True, timeout=30)
    for step in range(30):
        shapes = {"new shapes": step, "masks": min(step, 6)}
        x = torch.randn(2 * (40 - shapes.get(case, 0)), 8)
        stage.more = (
            0 if case == "masks" or rank else 10_000 * (step + 1 if case == "growing" else 1)
        )
        try:
            if case == "evaluations":
                pipe.eval(x)
            else:
                pipe.step(x, target=x)
        except tenure.BudgetError as error:
            return str(error), step + 1
        except tenure.CollectiveError:
            return "the other", step + 1
    return "nothing", 30


@pytest.mark.parametrize(
    ("case", "steps"), [("new shapes", 8), ("growing", 2), ("evaluations", 2), ("masks", 30)]
)
def test_what_is_left_behind_step_after_step_is_told_of(case: str, steps: int) -> None:
    (said, after), _ = run_ranks(told_of, 2, case)
    assert after == steps, said
    if case == "masks":
        assert said == "nothing"
        return
    assert "rank 0 of the pipeline ends" in said
    assert ("each of 8 steps" in said) is (steps == 8)


class Deepening(Wide):
    """Saves more the deeper it is told to go, and keeps nothing."""

    depth = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.up(x)
        for _ in range(self.depth):
            made = torch.sigmoid(made)
        return self.down(made)


def deepened(rank: int, _ranks: int, depths: list[int]) -> tuple[str, int]:
    """What is said, and after how many steps."""
    stage = Deepening()
    pipe = tenure.Pipeline(stage, "1f1b", 2, loss=mean, strict=True, timeout=30)
    x = torch.randn(2 * ROWS, 8)
    for step, depth in enumerate(depths):
        stage.depth = depth if rank == 0 else 1
        try:
            pipe.step(x, target=x)
        except tenure.BudgetError as error:
            return str(error), step + 1
        except tenure.CollectiveError:
            return "the other", step + 1
    return "nothing", len(depths)


@pytest.mark.parametrize(
    ("depths", "steps"),
    [
        ([1, 2, 3, 4], 3),  # the second one settles what the first has shown
        ([2] * 9 + [3] * 9, 10),
        ([3, 1, 1, 2], 4),
        ([1, 2, 2, 1, 2], 5),
    ],
)
def test_microbatches_that_take_more_from_step_to_step_are_told_of(
    depths: list[int], steps: int
) -> None:
    """The bound is learnt and stays: it does not grow with what it is to bound."""
    (said, after), _ = run_ranks(deepened, 2, depths)
    assert after == steps, said
    if depths[-1] == max(depths[:2]):
        assert said == "nothing"
        return
    assert re.search(
        r"^rank 0 of the pipeline has \S+ \S+ of the forward of stage 0 for microbatch 0, and had "
        r"at most \S+ \S+ in the first steps with these shapes: the stage or the loss keeps more",
        said,
    )


class Threaded(Wide):
    """Has another thread make something that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.of_others: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: self.of_others.append(torch.ones(100_000)))
        other.start()
        other.join()
        return super().forward(x)


class Learned(nn.Module):
    """A loss that learns, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean(self.head(output), target)


def not_the_stages(rank: int, _ranks: int, case: str) -> tuple[int, int]:
    """Steps of a strict pipeline, and those in which the case's own was there."""
    stage = Threaded() if case == "thread" else Wide()
    loss = Learned() if case == "loss" else mean
    pipe = tenure.Pipeline(stage, "1f1b", 2, loss=loss, strict=True, timeout=30)
    seen = 0
    for step in range(5):
        x = torch.randn(2 * ROWS, 8, requires_grad=case == "batch")
        pipe.step(x, target=torch.randn(2 * ROWS, 8))
        if case == "batch":
            seen += rank == 1 or x.grad is not None
        elif case == "loss":
            seen += rank == 0 or loss.head.weight.grad is not None
            loss.zero_grad() if rank == 1 else None
        else:
            seen += len(stage.of_others) == 2 * (step + 1)
        stage.zero_grad()
    return pipe.stats().steps, seen


@pytest.mark.parametrize("case", ["batch", "loss", "thread"])
def test_what_is_none_of_the_stages_is_not_counted(case: str) -> None:
    """A batch that wants a gradient, a loss with weights, another thread's tensors."""
    assert run_ranks(not_the_stages, 2, case) == [(5, 5), (5, 5)]


def alone(_rank: int, _ranks: int, evaluates: bool) -> tuple[int, str]:
    """Each step has fewer rows, and the stage makes a mask for each number of them."""
    stage, healthy = Hoarding(), 0
    pipe = tenure.Pipeline(stage, "1f1b", 2, loss=mean, strict=True, timeout=30)
    try:
        for step in range(24):
            x = torch.randn(2 * (40 - min(step // 2, 6)), 8)
            _ = pipe.eval(x) if evaluates else pipe.step(x, target=x)
            healthy += not stage.more
            stage.more = 10_000 if healthy == 14 else 0
    except tenure.BudgetError as error:
        return healthy, str(error)
    return healthy, "nothing"


@pytest.mark.parametrize("evaluates", [False, True])
def test_new_shapes_are_known_where_no_messages_tell_of_them(evaluates: bool) -> None:
    [(healthy, said)] = run_ranks(alone, 1, evaluates)
    assert healthy == 14
    assert "rank 0 of the pipeline" in said


class Long(Hoarding):
    """Of rows that have a length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def lengths(rank: int, ranks: int, name: str) -> list[str]:
    """Lengths that the targets, and so the last rank's own part of a batch, do not tell of."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean(output.mean(1), target)

    stages = [Long() for _ in pipelining.schedule(name, ranks, 2).stages_of(rank)]
    pipe = tenure.Pipeline(stages, name, 2, loss=loss, strict=True, timeout=30)
    said = []
    # Each comes twice in a row and then in turn, the longer one after the shorter.
    for step, length in enumerate([4, 4, 4, 8, 8, 8, *[4, 8, 6] * 6]):
        stages[-1].more = 100_000 if step == 23 else 0
        try:
            pipe.step(torch.randn(2 * ROWS, length, 8), target=torch.randn(2 * ROWS, 8))
            said.append("")
        except (tenure.BudgetError, tenure.CollectiveError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "zb-v"])
def test_each_length_has_its_bound(name: str) -> None:
    for said in run_ranks(lengths, 2, name):
        assert said[:-1] == [""] * 23
        assert "of the pipeline has" in said[-1]


def tied(_rank: int, _ranks: int) -> str:
    stages = [Hoarding(), Hoarding()]
    for mine, first in zip(stages[1].modules(), stages[0].modules(), strict=True):
        if isinstance(mine, torch.nn.Linear) and isinstance(first, torch.nn.Linear):
            mine.weight = first.weight
    plan = pipelining.schedule("interleaved-1f1b", 1, 2, 2)
    pipe = tenure.Pipeline(stages, plan, 2, loss=mean, strict=True, timeout=30)
    x = torch.randn(2 * ROWS, 8)
    stages[0].more = 200  # less than the gradients that both have
    try:
        for _ in range(12):
            for stage in stages:
                stage.zero_grad()
            pipe.step(x, target=x)
    except tenure.BudgetError as error:
        return str(error)
    return "nothing"


def test_a_weight_of_two_stages_hides_no_leak() -> None:
    [said] = run_ranks(tied, 1)
    assert "rank 0 of the pipeline" in said


def read_later(rank: int, _ranks: int) -> str:
    kept: list[torch.Tensor] = []

    class Keeping(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return super().forward(x)

    pipe = tenure.Pipeline(Keeping(), "1f1b", 2, loss=mean, timeout=30)
    pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    if rank == 0:
        return ""
    try:
        kept[0].sum()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_reading_a_received_tensor_after_its_microbatch_is_an_error_that_names_it() -> None:
    _, said = run_ranks(read_later, 2)
    assert said.startswith("UseAfterRelease")
    assert "at the end of microbatch 0 on stage 1" in said


class Receive(torch.autograd.Function):
    """Seed 003's cycle: a node that holds the tensor whose node it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.received = x.clone()
        return ctx.received

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Cyclic(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Receive.apply(x))


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class CyclicThroughTheLeaf(Wide):
    """The same through the leaf that was received: copy → Copy → AccumulateGrad → leaf → copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.copy = copy = Copy.apply(x)  # type: ignore[attr-defined]
        return super().forward(copy)


def cycles(rank: int, _ranks: int, stage: type[Wide]) -> list[str]:
    gc.disable()
    with tenure.watch(quiet=True, level="trace"):
        pipe = tenure.Pipeline(stage(), "1f1b", 2, loss=mean, timeout=30)
        for _ in range(3):
            pipe.step(torch.randn(512, 8), target=torch.randn(512, 8))
        found = tenure.census().cycles
    return [str(one) for one in found] if rank == 1 else []


@pytest.mark.parametrize(
    ("stage", "way"),
    [(Cyclic, ["Receive ctx"]), (CyclicThroughTheLeaf, ["AccumulateGrad", "copy"])],
)
def test_a_users_cycle_on_top_of_our_channels_is_found_with_its_path(
    stage: type[Wide], way: list[str]
) -> None:
    _, found = run_ranks(cycles, 2, stage)
    assert any(all(hop in one for hop in [*way, "count=6"]) for one in found), found
