"""What a pipeline costs beside torch.distributed.pipelining: ranks on Gloo, one thread each.

    python bench/pipeline.py [--ranks 2] [--microbatches 8] [--rounds 7] [--schedules 1f1b,zb-h1]
                             [--size tiny,small,base,large] [--width 128 --length 64 --rows 2]

The same model, schedule and microbatches under both, in turn in the same processes; the figure is
the median over rounds of the ratio of the two. The model is a stack of 8 GPT blocks, of one of four
sizes, or as width, tokens in a row and rows of a microbatch are given: the smaller it is, the more
a message is beside what is computed between two of them. `kB` is what one carries, `ms` a step.

`floor` is the ratio of a runtime that would cost nothing: the same forwards and backwards without
any communication, and the bubble. It knows of no half backwards: a runtime that sends a gradient
before it has found those of the weights has less of a bubble at the end, and may be below it.
The peak is the most bytes that tensors had in a step, as the allocator counts them, on the rank
where it is highest: activations and buffers for what is under way between ranks, without the batch,
parameters and gradients. `bound` is what the schedule promises of that for activations alone.
`buffers` are those to receive into that a runtime holds on to, at most, in MB.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for a file here has the name of one of Python's modules

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import models
import tables
import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed import pipelining as theirs

import tenure
from tenure import _C

SCHEDULES = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved-1f1b": theirs.ScheduleInterleaved1F1B,
    "looped-bfs": theirs.ScheduleLoopedBFS,
    "zb-h1": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.schedules.ScheduleDualPipeV,
}
# Width, tokens in a row, rows of a microbatch.
SIZES = {"tiny": (64, 16, 2), "small": (64, 64, 2), "base": (128, 64, 2), "large": (256, 128, 2)}
Step = Callable[[], None]


class Arm:
    """One runtime with its model."""

    def __init__(self, stages: list[nn.Module], step: Step, held: Callable[[], int]) -> None:
        self.stages, self.step, self.held = stages, step, held

    def run(self) -> None:
        for stage in self.stages:
            stage.zero_grad()
        self.step()


def layers(
    schedule: tenure.pipelining.Schedule, rank: int, options: argparse.Namespace
) -> list[nn.Module]:
    torch.manual_seed(0)
    each = options.blocks // schedule.stages
    all_of_them = [
        nn.Sequential(*(models.GptBlock(options.width, 4) for _ in range(each)))
        for _ in range(schedule.stages)
    ]
    return [all_of_them[number] for number in schedule.stages_of(rank)]


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def ours(schedule: tenure.pipelining.Schedule, rank: int, options: argparse.Namespace) -> Arm:
    stages = layers(schedule, rank, options)
    pipe = tenure.Pipeline(stages, schedule, schedule.microbatches, loss=mean)
    x, y = data(options)
    return Arm(stages, lambda: pipe.step(x, target=y), lambda: pipe.stats().receive_buffer_bytes)


def torchs(schedule: tenure.pipelining.Schedule, rank: int, options: argparse.Namespace) -> Arm:
    stages = layers(schedule, rank, options)
    numbers = schedule.stages_of(rank)
    parts = [
        theirs.PipelineStage(module, number, schedule.stages, torch.device("cpu"))
        for module, number in zip(stages, numbers, strict=True)
    ]
    kind = SCHEDULES[schedule.name]
    single = issubclass(kind, theirs.schedules.PipelineScheduleSingle)
    made = kind(parts[0] if single else parts, schedule.microbatches, loss_fn=mean)
    x, y = data(options)
    first, last = 0 in numbers, schedule.stages - 1 in numbers

    def step() -> None:
        made.step(*((x,) if first else ()), target=y if last else None)

    def held() -> int:
        return sum(received_bytes(part) for part in parts)

    return Arm(stages, step, held)


def received_bytes(stage: object) -> int:
    """What a stage of torch's keeps to receive into."""
    buffers = []
    for infos in (getattr(stage, "args_recv_info", {}), getattr(stage, "grad_recv_info", {})):
        for group in infos.values():
            buffers += [getattr(info, "buffer", None) for info in group]
    return sum(one.nbytes for one in buffers if isinstance(one, torch.Tensor))


def data(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (options.rows * options.microbatches, options.length, options.width)
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


def begin(rank: int, world: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )


def alone(schedule: tenure.pipelining.Schedule, rank: int, options: argparse.Namespace) -> Arm:
    """What the rank computes, and nothing else."""
    stages = layers(schedule, rank, options)
    x, _ = data(options)

    def step() -> None:
        for one in x.tensor_split(schedule.microbatches):
            for stage in stages:
                mean(stage(one.clone().requires_grad_()), one).backward()

    return Arm(stages, step, lambda: 0)


ARMS = {"tenure": ours, "torch": torchs}


def timed(rank: int, world: int, store: str, name: str, options: argparse.Namespace, out: Path):
    """Both in turn, in an order drawn anew in each round."""
    begin(rank, world, store)
    schedule = tenure.pipelining.schedule(name, world, options.microbatches)
    arms = {arm: make(schedule, rank, options) for arm, make in ARMS.items()}
    for arm in arms.values():
        for _ in range(2):
            arm.run()
    same = [
        torch.equal(mine.grad, other.grad / schedule.microbatches)
        or torch.allclose(mine.grad, other.grad, rtol=1e-4, atol=1e-7)
        for mine, other in zip(
            *([p for stage in arms[arm].stages for p in stage.parameters()] for arm in ARMS),
            strict=True,
        )
    ]
    assert all(same), "the two do not find the same gradients"
    arms["alone"] = alone(schedule, rank, options)
    arms["alone"].run()
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        order = list(arms)
        random.Random(number).shuffle(order)  # what ran before has warmed the cores
        for arm in order:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                arms[arm].run()
            dist.barrier()
            times[arm].append((time.perf_counter() - start) / options.steps)
    if rank == 0:
        torch.save(times, out)
    dist.destroy_process_group()


def weighed(
    rank: int, world: int, store: str, name: str, arm: str, options: argparse.Namespace, out: Path
):
    """The peak, in processes that have nothing else."""
    begin(rank, world, store)
    schedule = tenure.pipelining.schedule(name, world, options.microbatches)
    meter = _C.HostMeter()
    one = ARMS[arm](schedule, rank, options)
    parameters = sum(p.nbytes for stage in one.stages for p in stage.parameters())
    given = sum(tensor.nbytes for tensor in data(options))
    for _ in range(3):
        one.run()
    meter.read()
    one.run()
    peak = meter.read()[1] - 2 * parameters - given  # theirs and their gradients'
    # The activations of one microbatch on each stage, from a forward outside of any schedule.
    lone = []
    for stage in one.stages:
        x = torch.randn(options.rows, options.length, options.width, requires_grad=True)
        before, _ = meter.read()
        made = stage(x)
        lone.append((meter.read()[0] - before, meter.read()[0] - before))
        del made
    told = {
        "peak": peak,
        "held": one.held(),
        "bound": schedule.peak_bytes(rank, lone),
        "in_flight": schedule.bound(rank).in_flight,
    }
    all_told: list[dict[str, int] | None] = [None] * world
    dist.all_gather_object(all_told, told)
    if rank == 0:
        torch.save(all_told, out)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=8, help="in all stages together")
    parser.add_argument("--size", default="base", help=f"some of {', '.join(SIZES)}")
    parser.add_argument("--width", type=int, help="instead of a size's, as the next two")
    parser.add_argument("--length", type=int, help="tokens in a row")
    parser.add_argument("--rows", type=int, help="of a microbatch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of an arm in a round")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    options = parser.parse_args()
    names, sizes = options.schedules.split(","), options.size.split(",")
    for name, there in [(n, SCHEDULES) for n in names] + [(n, SIZES) for n in sizes]:
        if name not in there:
            sys.exit(f"no such schedule or size: {name}; there are {', '.join(there)}")
    columns = ["size", "schedule", "kB", "ms", "torch", "ratio", "floor"]
    columns += ["peak MB", "torch", "bound", "buffers", "torch", "in flight"]
    table = tables.Table(f"pipeline-{options.ranks}", columns)
    for size in sizes:
        chosen = zip((options.width, options.length, options.rows), SIZES[size], strict=True)
        width, length, rows = (of_size if one is None else one for one, of_size in chosen)
        one = argparse.Namespace(
            **{**vars(options), "size": size, "width": width, "length": length, "rows": rows}
        )
        for name in names:
            measure(table, name, one)
    table.show()


def measure(table: tables.Table, name: str, options: argparse.Namespace) -> None:
    """One schedule at one size."""
    world = options.ranks
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        given = (world, f"{folder}/store", name, options, out)
        multiprocessing.spawn(timed, given, nprocs=world)
        times: dict[str, list[float]] = torch.load(out)
        weights: dict[str, list[dict[str, int]]] = {}
        for arm in ARMS:
            given = (world, f"{folder}/{arm}", name, arm, options, out)
            multiprocessing.spawn(weighed, given, nprocs=world)
            weights[arm] = torch.load(out)
    schedule = tenure.pipelining.schedule(name, world, options.microbatches)
    add(table, name, options, times, weights, min(schedule.timeline().bubbles))


def add(
    table: tables.Table,
    name: str,
    options: argparse.Namespace,
    times: dict[str, list[float]],
    weights: dict[str, list[dict[str, int]]],
    bubble: float,
) -> None:
    floor = statistics.median(
        a / (1 - bubble) / b for a, b in zip(times["alone"], times["torch"], strict=True)
    )
    ratio = statistics.median(a / b for a, b in zip(times["tenure"], times["torch"], strict=True))
    most = {arm: max(told, key=lambda one: one["peak"]) for arm, told in weights.items()}
    held = {arm: max(one["held"] for one in told) for arm, told in weights.items()}
    message = 4 * options.rows * options.length * options.width
    cells = [options.size, name, f"{message / 1e3:.0f}"]
    milliseconds = {arm: 1e3 * statistics.median(times[arm]) for arm in ARMS}
    cells += [f"{one:.0f}" if one >= 100 else f"{one:.1f}" for one in milliseconds.values()]
    cells += [f"{ratio:.3f}", f"{floor:.3f}"]
    cells += [f"{most[arm]['peak'] / 1e6:.1f}" for arm in ARMS]
    cells.append(f"{most['tenure']['bound'] / 1e6:.1f}")
    cells += [f"{held[arm] / 1e6:.1f}" for arm in ARMS]
    cells.append("/".join(str(one["in_flight"]) for one in weights["tenure"]))
    shape = {"width": options.width, "length": options.length, "rows": options.rows}
    figures = {"ratio": ratio, "floor": floor, "memory": weights}
    table.add(cells, size=options.size, **shape, schedule=name, seconds=times, **figures)


if __name__ == "__main__":
    main()
