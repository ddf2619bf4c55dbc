"""What sharding costs beside its peers: ranks on Gloo, one thread each, arms in turn in one run.

    python bench/shard.py [--ranks 2] [--model mlp,gpt,gpt-small] [--rounds 5] [--arms tenure,FSDP2]

Each round trains a few steps under every arm, in turn; a ratio is the median over rounds of the
ratio within a round. `plain` trains without any communication, so it is what the same work takes on
one rank, and its ratio to FSDP2 what sharding that costs nothing would have.

`mlp` and `gpt` have 8 blocks of width 1024 and a million parameters for each token of a step, so
that what sharding moves counts beside what is computed; `gpt-small`, of width 384, has 22,000, and
there no sharding could be 0.8 × FSDP2. `llama` is 16 blocks of width 2048 in bf16 on CUDA, by NCCL.

`peak` is the most bytes that tensors had in a step: all that is alive of parameters, gradients,
buffers of collectives and activations, as the allocator counts them (an optimizer without state is
used, so that nothing else is in it). `states` is the same for a step of a single token, which has
next to no activations, under the same arm and model: parameters, gradients and communication.
`host µs` is what the training thread computes, waiting apart, for one block's gather and release:
a forward of blocks of width 16, less what plain takes for it.

DeepSpeed takes part where it can be imported:

    scripts/peers deepspeed && build/peers-deepspeed/bin/python bench/shard.py
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for a file here has the name of one of Python's modules

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import models
import tables
import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F  # noqa: N812

import tenure
from tenure import _C

MODELS = ["mlp", "gpt", "gpt-small", "llama"]


class MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Mlp(nn.Module):
    """8 blocks; of width 1024 a unit is 33.6 MB."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class Job:
    """A model, and how its loss is found: of a whole batch, or of one token."""

    model: nn.Module
    batch: torch.Tensor
    token: torch.Tensor
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def next_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def made(kind: str) -> Job:
    torch.manual_seed(0)
    if kind == "llama":
        hidden = torch.randn(1, 8192, 2048, device="cuda", dtype=torch.bfloat16)
        return Job(
            models.Llama().to("cuda", torch.bfloat16), hidden, hidden[:, :1].clone(), squares
        )
    if kind in ("mlp", "tiny"):
        width = 1024 if kind == "mlp" else 16
        x = torch.randn(64, width)
        return Job(Mlp(width), x, x[:1].clone(), squares)
    if kind == "gpt":
        model, rows, length = models.Gpt(layers=8, width=1024, heads=16), 2, 48  # 105 M parameters
    else:
        model, rows, length = models.Gpt(), 2, 256
    tokens = torch.randint(512, (rows, length + 1))
    return Job(model, tokens, tokens[:1, :2].clone(), next_tokens)


class Arm:
    """One way to train a model."""

    def __init__(self, job: Job, shard: Callable[[nn.Module], nn.Module | None]) -> None:
        self.job = job
        self.model = shard(job.model) or job.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.job.loss(self.model, batch)

    def step(self, batch: torch.Tensor) -> None:
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class DeepSpeed(Arm):
    def __init__(self, job: Job) -> None:
        import deepspeed

        super().__init__(job, lambda _: None)
        # Its buffers are for hundreds of millions of elements otherwise: a block's are enough.
        block = max(sum(p.numel() for p in block.parameters()) for block in job.model.blocks)
        stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
        stage |= {"reduce_bucket_size": block, "stage3_prefetch_bucket_size": block}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage}
        config["zero_allow_untested_optimizer"] = True
        self.model, *_ = deepspeed.initialize(
            model=job.model, optimizer=self.optimizer, config=config
        )

    def step(self, batch: torch.Tensor) -> None:
        self.model.backward(self.loss(batch))
        self.model.step()


def fsdp2(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


ARMS: dict[str, Callable[[Job], Arm]] = {
    "plain": lambda job: Arm(job, lambda _: None),
    "tenure": lambda job: Arm(job, lambda model: tenure.shard(model, prefetch=1)),
    "tenure, no prefetch": lambda job: Arm(job, lambda model: tenure.shard(model, prefetch=0)),
    "FSDP2": lambda job: Arm(job, fsdp2),
    "DeepSpeed ZeRO-3": DeepSpeed,
}


def available(names: list[str]) -> list[str]:
    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401

        return names
    return [name for name in names if not name.startswith("DeepSpeed")]


class Peak:
    """The most bytes of tensors alive at once, of steps."""

    def __init__(self, kind: str) -> None:
        self._host = None if kind == "llama" else _C.HostMeter()

    def of(self, step: Callable[[], None]) -> int:
        if self._host is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._host.read()
        step()
        return torch.cuda.max_memory_allocated() if self._host is None else self._host.read()[1]


def one_arm_alone(rank: int, world: int, store: str, name: str, kind: str, out: Path) -> None:
    """The peak, in processes that have nothing else."""
    begin(rank, world, store, kind)
    peak = Peak(kind)
    job = made(kind)
    arm = ARMS[name](job)

    def most_of(batch: torch.Tensor) -> int:
        return max([peak.of(lambda: arm.step(batch)) for _ in range(5)][3:])

    found: dict[str, object] = {"peak": most_of(job.batch)}
    if name.startswith("tenure"):
        told = arm.model.tenure.stats()
        gathers = sum(unit.gathers for unit in told.units)
        found |= {
            "excess": told.excess,
            "gathered": told.peak_gathered_bytes,
            "least": told.peak_needed_bytes,
            "largest_unit": max(unit.bytes for unit in told.units),
            "waited_us": 1e6 * sum(unit.waited_seconds for unit in told.units) / gathers,
            "lag_us": 1e6 * sum(unit.lag_seconds for unit in told.units) / gathers,
        }
    found["states"] = most_of(job.token)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def all_arms(
    rank: int, world: int, store: str, kind: str, options: argparse.Namespace, out: Path
) -> None:
    begin(rank, world, store, kind)
    arms = {name: ARMS[name](made(kind)) for name in options.arms}
    for arm in arms.values():
        for _ in range(3):
            arm.step(arm.job.batch)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds):
        order = list(arms)
        at = number % len(order)
        for name in order[at:] + order[:at]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                arms[name].step(arms[name].job.batch)
            times[name].append((time.perf_counter() - start) / options.steps)
        if rank == 0 and sys.stderr.isatty():
            print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr)
    if rank == 0:
        torch.save(times, out)
    dist.destroy_process_group()


def on_the_host(rank: int, world: int, store: str, options: argparse.Namespace, out: Path) -> None:
    """CPU time of the thread that trains, for a forward of blocks that are next to nothing."""
    begin(rank, world, store, "tiny")
    arms = {name: ARMS[name](made("tiny")) for name in options.arms}
    times: dict[str, list[float]] = {name: [] for name in arms}
    with torch.no_grad():
        for number in range(11):
            for name, arm in arms.items():
                dist.barrier()
                start = time.thread_time()
                for _ in range(20):
                    arm.loss(arm.job.token)
                if number > 0:
                    times[name].append((time.thread_time() - start) / 20)
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
    parser.add_argument("--model", default="mlp,gpt,gpt-small", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of an arm in a round")
    parser.add_argument("--arms", default=",".join(ARMS).replace("tenure, ", "tenure; "))
    options = parser.parse_args()
    kinds = options.model.split(",")
    asked = [name.replace(";", ",") for name in options.arms.split(",")]
    for name, there in [(one, MODELS) for one in kinds] + [(one, list(ARMS)) for one in asked]:
        if name not in there:
            sys.exit(f"no such model or arm: {name}; there are {'; '.join(there)}")
    options.arms = available(asked)
    host = {} if "llama" in kinds or "plain" not in options.arms else spawned(options, on_the_host)
    for kind in kinds:
        times = spawned(options, all_arms, kind)
        alone = {name: spawned(options, one_arm_alone, name, kind) for name in options.arms}
        show(options, kind, times, alone, host)


def spawned(options: argparse.Namespace, work: Callable[..., None], *given: str) -> dict:
    """What rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        more = (options,) if work is not one_arm_alone else ()
        multiprocessing.spawn(
            work, (options.ranks, f"{folder}/store", *given, *more, out), nprocs=options.ranks
        )
        return torch.load(out)


def ratio(times: dict[str, list[float]], name: str, other: str) -> float | None:
    if other not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def show(
    options: argparse.Namespace,
    kind: str,
    times: dict[str, list[float]],
    alone: dict[str, dict],
    host: dict[str, list[float]],
) -> None:
    columns = ["arm", "ms a step", "× plain", "× FSDP2", "peak MB", "states MB"]
    columns += ["gathered MB", "least", "lag µs", "host µs"]
    table = tables.Table(f"shard-{kind}-{options.ranks}", columns)
    for name in options.arms:
        found = alone[name]
        ratios = [ratio(times, name, other) for other in ("plain", "FSDP2")]
        cells = [name, f"{1e3 * statistics.median(times[name]):.0f}"]
        cells += ["" if one is None else f"{one:.2f}" for one in ratios]
        for figure, digits in (("peak", 1), ("states", 1), ("gathered", 1), ("least", 1)):
            cells.append(f"{found[figure] / 1e6:.{digits}f}" if figure in found else "")
        cells.append(f"{found['lag_us']:.1f}" if "lag_us" in found else "")
        each = None
        if host and name != "plain":
            differences = zip(host[name], host["plain"], strict=True)
            each = 1e6 * statistics.median(a - b for a, b in differences) / 8
        cells.append("" if each is None else f"{each:.0f}")
        table.add(cells, arm=name, seconds=times[name], ratios=ratios, host_us=each, **found)
    table.show()
    for line in bars(times, alone, options.ranks):
        print(line)


def bars(times: dict[str, list[float]], alone: dict[str, dict], ranks: int) -> list[str]:
    """What was set before anything was measured, and whether it holds."""
    out = []

    def bar(what: str, figure: float, most: float) -> None:
        out.append(
            f"{what} {figure:.2f}, bar {most:.2f}: {'holds' if figure <= most else 'missed'}"
        )

    for name in ("tenure", "tenure, no prefetch"):
        if name not in times:
            continue
        found = alone[name]
        if ranks == 1 and "plain" in times:  # nothing is sent: FSDP2 is as fast
            bar(f"{name}: × plain's time", ratio(times, name, "plain"), 1.03)
        if ranks > 1 and "FSDP2" in times:
            bar(f"{name}: × FSDP2's time", ratio(times, name, "FSDP2"), 0.8)
        if "FSDP2" in times:
            bar(f"{name}: states, MB", found["states"] / 1e6, alone["FSDP2"]["states"] / 1e6)
        ahead = found["largest_unit"] if name == "tenure" else 0
        bar(f"{name}: gathered, MB", found["gathered"] / 1e6, (found["least"] + ahead) / 1e6)
    return out


if __name__ == "__main__":
    main()
