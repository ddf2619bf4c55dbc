"""What watching costs, beside its peers, in one process with all arms interleaved.

    python bench/inspect.py [--device cpu|cuda] [--minutes 8] [--steps N] [--arms count,trace]
        [--small]

Each round trains a few steps under every arm, in random order, and twice plainly; the figure is the
median over rounds of an arm's time to the mean of that round's plain ones, with the range in which
it lies in 95 of 100 draws of as many rounds. A bar holds if the whole range is below it and is
missed if the whole range is above it. Where the machine is too noisy to tell by the clock, CPU time
decides, of all threads, user and system. `--arms all` adds what has no bar: deep, and memray or
torch's own memory history.

The milliseconds that an arm adds to a step do not depend on how large the tensors are: where even
CPU time is too noisy, --small tells them from the same model on a batch of 8 tokens. On the CPU a
GPT of 6 layers, width 384, T 256, batch 8, fp32; on CUDA 16 Llama blocks of width 2048, T 8192,
bf16.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for this file has the name of one of Python's modules

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import models
import tables
import torch
from ranges import Range, against, verdict

import tenure

# Steps under an arm that are not counted: what an arm does once is not a step's cost. What trace
# does at steps 4, 8, 16, ... is, so few steps in a round make it look dearer than it is.
WARM = 2
# So many, unless there is no time for the rounds without which nothing can be told.
STEPS, FEWEST, ROUNDS = 24, 8, 8
BARS = {"cpu": {"count": 1.01, "trace": 1.05}, "cuda": {"count": 1.01, "trace": 1.03}}


def training_step(device: str, small: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    if device == "cpu":
        model: torch.nn.Module = models.Gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = torch.randint(512, (1, 9) if small else (8, 257))

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


@dataclass
class Round:
    """Seconds a step of one arm in one round, by the clock and of CPU time."""

    wall: float
    work: float


Times = dict[str, list[Round]]


def timed(step: Callable[[], None], steps: int) -> Round:
    for _ in range(WARM):
        step()
    begin, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    took, work = time.perf_counter() - begin, time.process_time() - worked
    return Round(took / steps, work / steps)


def mean(a: Round, b: Round) -> Round:
    return Round((a.wall + b.wall) / 2, (a.work + b.work) / 2)


def steps_for(step: Callable[[], None], arms_of_a_round: int, minutes: float) -> int:
    """Steps of an arm in a round."""
    timed(step, 1)
    took = timed(step, 2).wall
    return max(FEWEST, min(STEPS, int(60 * minutes / (ROUNDS * arms_of_a_round * took)) - WARM))


def measured(
    step: Callable[[], None],
    device: str,
    names: list[str],
    rounds: int,
    minutes: float,
    steps: int | None,
) -> Times:
    """Each arm's times, round by round, and those of plain; as many rounds as there is time for."""
    ways = {"plain": contextlib.nullcontext, **arms(device)}
    fitting = steps_for(step, len(names) + 2, minutes)
    steps = steps or fitting
    times: Times = {name: [] for name in ["plain", *names]}
    order = random.Random(0)
    began = time.monotonic()
    longest = 0.0
    while len(times["plain"]) < rounds and (
        len(times["plain"]) < 2 or time.monotonic() - began + longest < 60 * minutes
    ):
        begin = time.monotonic()
        plain = []
        for name in order.sample(["plain", "plain", *names], len(names) + 2):
            with ways[name]():
                (plain if name == "plain" else times[name]).append(timed(step, steps))
        times["plain"].append(mean(*plain))
        longest = max(longest, time.monotonic() - begin)
        if sys.stderr.isatty():
            print(f"\r{len(times['plain'])} rounds", end="", file=sys.stderr)
    return times


def ratio(times: Times, name: str, what: str) -> Range:
    """Of an arm's time to plain's, round by round."""
    pairs = zip(times[name], times["plain"], strict=True)
    return Range.of([getattr(mine, what) / getattr(plain, what) for mine, plain in pairs])


def added(times: Times, name: str) -> float:
    """Milliseconds that an arm adds to a step: the median over rounds."""
    pairs = zip(times[name], times["plain"], strict=True)
    return 1e3 * statistics.median(mine.wall - plain.wall for mine, plain in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, default=8, help="as many rounds as they are for")
    parser.add_argument("--rounds", type=int, default=1000, help="no more than these")
    parser.add_argument(
        "--steps", type=int, help="of an arm in a round; without it as many as there is time for"
    )
    parser.add_argument("--arms", default="count,trace", help="with commas between; all: all")
    parser.add_argument("--small", action="store_true", help="tokens, for the milliseconds added")
    options = parser.parse_args()
    if options.small and options.device != "cpu":
        sys.exit("--small is for the CPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device: --device cpu")
    known = list(arms(options.device))
    names = known if options.arms == "all" else options.arms.split(",")
    if unknown := set(names) - set(known):
        sys.exit(f"no such arm: {', '.join(unknown)}; there are {', '.join(known)}")

    step = training_step(options.device, options.small)
    given = options.device, names, options.rounds, options.minutes, options.steps
    times = measured(step, *given)
    columns = ["arm", "ms a step", "+ ms", "x plain (95 %)", "x CPU time (95 %)", "bar", ""]
    table = tables.Table(f"inspect-{options.device}{'-small' if options.small else ''}", columns)
    for name, found in times.items():
        wall, work = ratio(times, name, "wall"), ratio(times, name, "work")
        bar = None if options.small else BARS[options.device].get(name)
        said = verdict(bar, {"the clock": wall, "CPU time": work}) if bar else ""
        more = added(times, name)
        ms = 1e3 * statistics.median(one.wall for one in found)
        is_plain = name == "plain"
        table.add(
            [
                name,
                f"{ms:.1f}",
                "" if is_plain else f"{more:.2f}",
                f"{len(found)} rounds" if is_plain else wall.text(3),
                "" if is_plain else work.text(3),
                f"{bar or ''}",
                said,
            ],
            arm=name,
            seconds=[one.wall for one in found],
            cpu_seconds=[one.work for one in found],
            ratio=asdict(wall),
            cpu_ratio=asdict(work),
            bar=bar,
            verdict=said,
            by_the_clock=against(bar, wall) if bar else None,
            by_cpu_time=against(bar, work) if bar else None,
            added_ms=more,
        )
    table.show()


if __name__ == "__main__":
    main()
