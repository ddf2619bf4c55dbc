"""What watching costs, beside its peers, in one process with all arms interleaved.

    python bench/inspect.py [--device cpu|cuda] [--rounds 12] [--steps 4]

Each round trains a few steps under every arm, in turn; the figure is the median over rounds of an
arm's time to that of the same round's plain arm. Beside it the same of CPU time, of all threads:
where other machines share the cores, it is the steadier of the two. On the CPU a GPT of 6 layers,
width 384, T 256, batch 8, fp32, with memray beside; on CUDA 16 Llama blocks of width 2048, T 8192,
bf16, with torch's own memory history beside.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for this file has the name of one of Python's modules

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import report
import torch
from rich.progress import Progress

import tenure

BARS = {"cpu": {"count": 1.01, "trace": 1.05}, "cuda": {"count": 1.01, "trace": 1.03}}


def training_step(device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    if device == "cpu":
        model: torch.nn.Module = models.Gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = torch.randint(512, (8, 257))

        def step() -> None:
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    model = models.Llama().to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    hidden = torch.randn(1, 8192, 2048, device="cuda", dtype=torch.bfloat16)

    def step_on_device() -> None:
        model(hidden).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return step_on_device


@contextlib.contextmanager
def watched(level: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, tenure.watch(folder, level=level, quiet=True):
        yield


@contextlib.contextmanager
def under_memray() -> Iterator[None]:
    import memray

    with tempfile.TemporaryDirectory() as folder, memray.Tracker(Path(folder) / "memray.bin"):
        yield


@contextlib.contextmanager
def under_history() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="all")
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def arms(device: str) -> dict[str, Callable[[], contextlib.AbstractContextManager[object]]]:
    out: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "plain": contextlib.nullcontext,
        "count": lambda: watched("count"),
        "trace": lambda: watched("trace"),
        "deep": lambda: watched("deep"),
    }
    if device == "cuda":
        out["memory history of torch"] = under_history
    else:
        with contextlib.suppress(ImportError):
            import memray  # noqa: F401

            out["memray"] = under_memray
    return out


Times = dict[str, list[tuple[float, float]]]


def measured(device: str, rounds: int, steps: int) -> Times:
    """Seconds a step of each arm, and of CPU time, round by round. First steps are not counted."""
    step, ways = training_step(device), arms(device)
    for _ in range(3):
        step()
    times: Times = {name: [] for name in ways}
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        for number in progress.track(range(rounds), description="rounds"):
            order = list(ways)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                with ways[name]():
                    step()
                    begin, worked = time.perf_counter(), time.process_time()
                    for _ in range(steps):
                        step()
                    took, work = time.perf_counter() - begin, time.process_time() - worked
                    times[name].append((took / steps, work / steps))
    return times


def ratio(times: Times, name: str, which: int) -> float:
    pairs = zip(times[name], times["plain"], strict=True)
    return statistics.median(mine[which] / plain[which] for mine, plain in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="steps of an arm in a round")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device: --device cpu")

    times = measured(options.device, options.rounds, options.steps)
    table = report.Table(
        f"inspect-{options.device}", ["arm", "ms a step", "× plain", "bar", "", "CPU time"]
    )
    for name, found in times.items():
        wall, work = ratio(times, name, 0), ratio(times, name, 1)
        bar = BARS[options.device].get(name)
        holds = "" if bar is None else "holds" if wall <= bar else "MISSED"
        ms = 1e3 * statistics.median(took for took, _ in found)
        table.add(
            [name, f"{ms:.1f}", f"{wall:.3f}", f"{bar or ''}", holds, f"{work:.3f}"],
            arm=name,
            seconds=found,
            ratio=wall,
            cpu_ratio=work,
        )
    table.show()


if __name__ == "__main__":
    main()
