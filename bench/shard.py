"""What sharding costs beside its peers: ranks on Gloo, one thread each, arms in turn in one run.

    python bench/shard.py [--ranks 2] [--model mlp|gpt|llama] [--rounds 5] [--arms tenure,FSDP2]

Each round trains a few steps under every arm, in turn, and the figure is the median over rounds.
`plain` trains without any communication, so it is what the same work takes on one rank. The peak is
the most bytes that tensors had in a step: all that is alive of parameters, gradients, buffers of
collectives and activations, as the allocator counts them (an optimizer without state is used, so
that nothing else is in it). DeepSpeed takes part where it can be imported. `--model llama` is 16
blocks of width 2048 in bf16 on CUDA, by NCCL.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for a file here has the name of one of Python's modules

import argparse
import contextlib
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import models
import tables
import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F  # noqa: N812

import tenure

Step = Callable[[], None]


class MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Mlp(nn.Module):
    """8 blocks of width 1024: a unit is 33.6 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(1024) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made(kind: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A model, and how its loss is found."""
    torch.manual_seed(0)
    if kind == "llama":
        hidden = torch.randn(1, 8192, 2048, device="cuda", dtype=torch.bfloat16)
        llama = models.Llama().to("cuda", torch.bfloat16)
        return llama, lambda model: model(hidden).float().square().mean()
    if kind == "mlp":
        x = torch.randn(64, 1024)
        return Mlp(), lambda model: model(x).square().mean()
    tokens = torch.randint(512, (2, 257))

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return models.Gpt(), loss


def training(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def plain(kind: str) -> Step:
    return training(*made(kind))


def ours(kind: str, prefetch: int) -> tuple[Step, nn.Module]:
    model, loss = made(kind)
    tenure.shard(model, prefetch=prefetch)
    return training(model, loss), model


def fsdp2(kind: str) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, loss = made(kind)
    mesh = init_device_mesh("cuda" if kind == "llama" else "cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training(model, loss)


def zero3(kind: str) -> Step:
    import deepspeed

    model, loss = made(kind)
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage}
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        engine.backward(loss(engine))
        engine.step()

    return step


ARMS = ["plain", "tenure", "tenure, no prefetch", "FSDP2", "DeepSpeed ZeRO-3"]


def arm(name: str, kind: str) -> tuple[Step, nn.Module | None]:
    if name == "plain":
        return plain(kind), None
    if name.startswith("tenure"):
        return ours(kind, prefetch=0 if "no prefetch" in name else 1)
    return (fsdp2(kind) if name == "FSDP2" else zero3(kind)), None


def available(names: list[str]) -> list[str]:
    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401

        return names
    return [name for name in names if not name.startswith("DeepSpeed")]


@contextlib.contextmanager
def peak_of_steps(kind: str) -> Iterator[list[int]]:
    """Most bytes of tensors alive, of each step in here; on CUDA, of all of them."""
    found: list[int] = []
    if kind == "llama":
        torch.cuda.reset_peak_memory_stats()
        yield found
        found += [torch.cuda.max_memory_allocated()] * 4
        return
    with tempfile.TemporaryDirectory() as folder:
        with tenure.watch(folder, level="count", quiet=True):
            yield found
        [file] = Path(folder).glob("*.sqlite")
        with contextlib.closing(sqlite3.connect(file)) as recording:
            found += [row[0] for row in recording.execute("SELECT peak FROM steps ORDER BY step")]


def one_arm_alone(rank: int, world: int, store: str, name: str, kind: str, out: Path) -> None:
    """The peak, in processes that have nothing else."""
    begin(rank, world, store, kind)
    with peak_of_steps(kind) as peaks:
        step, model = arm(name, kind)
        for _ in range(6):
            step()
    stats = {}
    if model is not None:
        told = model.tenure.stats()
        gathers = sum(unit.gathers for unit in told.units)
        stats = {
            "excess": told.excess,
            "peak_gathered": told.peak_gathered_bytes,
            "peak_needed": told.peak_needed_bytes,
            "waited_us": 1e6 * sum(unit.waited_seconds for unit in told.units) / gathers,
            "lag_us": 1e6 * sum(unit.lag_seconds for unit in told.units) / gathers,
        }
    if rank == 0:
        torch.save({"peak": max(peaks[3:]), "stats": stats}, out)
    dist.destroy_process_group()


def all_arms(rank: int, world: int, store: str, options: argparse.Namespace, out: Path) -> None:
    begin(rank, world, store, options.model)
    steps = {name: arm(name, options.model)[0] for name in options.arms}
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds):
        order = list(steps)
        at = number % len(order)
        for name in order[at:] + order[:at]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                steps[name]()
            times[name].append((time.perf_counter() - start) / options.steps)
        if rank == 0 and sys.stderr.isatty():
            print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr)
    if rank == 0:
        torch.save(times, out)
    dist.destroy_process_group()


def begin(rank: int, world: int, store: str, kind: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    if kind == "llama":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if kind == "llama" else "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=["mlp", "gpt", "llama"], default="mlp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of an arm in a round")
    parser.add_argument("--arms", default=",".join(ARMS).replace("tenure, ", "tenure; "))
    options = parser.parse_args()
    asked = [name.replace(";", ",") for name in options.arms.split(",")]
    if unknown := [name for name in asked if name not in ARMS]:
        sys.exit(f"no such arm: {unknown[0]}; there are {'; '.join(ARMS)}")
    options.arms = available(asked)

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        world = options.ranks
        multiprocessing.spawn(all_arms, (world, f"{folder}/store", options, out), nprocs=world)
        times: dict[str, list[float]] = torch.load(out)
        alone: dict[str, dict[str, object]] = {}
        for number, name in enumerate(options.arms):
            arguments = (world, f"{folder}/store{number}", name, options.model, out)
            multiprocessing.spawn(one_arm_alone, arguments, nprocs=world)
            alone[name] = torch.load(out)
    show(options, times, alone)


def show(
    options: argparse.Namespace, times: dict[str, list[float]], alone: dict[str, dict]
) -> None:
    columns = [
        "arm",
        "ms a step",
        "× plain",
        "× FSDP2",
        "peak MB",
        "gathered MB",
        "least",
        "lag µs",
    ]
    table = tables.Table(f"shard-{options.model}-{options.ranks}", columns)
    median = {name: statistics.median(found) for name, found in times.items()}
    for name in options.arms:
        stats = alone[name]["stats"]
        cells = [name, f"{1e3 * median[name]:.0f}"]
        cells += [
            f"{median[name] / median[other]:.2f}" if other in median else ""
            for other in ("plain", "FSDP2")
        ]
        cells.append(f"{alone[name]['peak'] / 1e6:.1f}")
        gathered = ("peak_gathered", "peak_needed")
        cells += [f"{stats[figure] / 1e6:.1f}" if stats else "" for figure in gathered]
        cells.append(f"{stats['lag_us']:.1f}" if stats else "")
        table.add(cells, arm=name, seconds=times[name], peak=alone[name]["peak"], **stats)
    table.show()


if __name__ == "__main__":
    main()
