"""What a job of many ranks costs: generated recordings, one verdict, one report.

    python bench/ranks.py [--ranks 2048] [--out FOLDER] [--steps 4000] [--only-make]

A small program is really watched as some ranks of such a job: one that is only
counted, the lowest of a stage, the lowest of the stage that leaks, and one that leaks by itself.
The others are copies of these with a place, a host, a pid and a pace of their own: 8 stages, data
parallel over what is left, 8 tensor-parallel ranks that are a host's GPUs. The bars are those of
the whole report: 60 s and 2 GB; judging may take half the time and half the memory.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for this folder has names of Python's modules

import argparse
import json
import os
import random
import runpy
import shutil
import sqlite3
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tables
import torch._dynamo  # the first step of an optimizer would import it
from rich.progress import track

import tenure
from tenure.inspect import recordings, verdicts
from tenure.inspect.options import VARIABLE, Options

STAGES, GPUS = 8, 8
LEAKING = 2  # stage
PACE = 65_536  # bytes a step that are kept
BAR_SECONDS, BAR_BYTES, BAR_PAGE = 60.0, 2e9, 20_000_000

PROGRAM = """
import json, os, sys
import torch
import tenure

steps, kind, place = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
tenure.coordinates(**place)


class Recall:
    def __init__(self):
        self.scores = []

    def update(self, scores):
        self.scores.append(scores)


def main():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    received, recall = [], Recall()
    for _ in range(steps):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "stage":
            received.append(torch.ones(16384))
        if kind == "alone":
            recall.update(torch.zeros(8192) + 1)


main()
"""


@dataclass(frozen=True)
class Place:
    """A rank, and where it is in the job."""

    rank: int
    ranks: int

    @property
    def coordinates(self) -> dict[str, int]:
        a_stage = max(1, self.ranks // STAGES)
        at = self.rank % a_stage
        return {"stage": self.rank // a_stage, "dp": at // GPUS, "tp": at % GPUS}

    @property
    def host(self) -> str:
        return f"node{self.rank // GPUS:03}"

    @property
    def is_lowest(self) -> bool:
        place = self.coordinates
        return place["dp"] == place["tp"] == 0

    @property
    def leaks(self) -> bool:
        return self.coordinates["stage"] == LEAKING


def outlier_of(ranks: int) -> Place:
    """One that leaks by itself: in the middle of the sixth stage."""
    return Place(5 * (ranks // STAGES) + ranks // STAGES // 2 + 1, ranks)


def start(folder: Path, steps: int, place: Place, kind: str) -> int:
    """Starts the program as one rank of the job, in a child that shares the import of torch."""
    child = os.fork()
    if child > 0:
        return child
    code = 1
    try:
        os.environ |= {
            VARIABLE: Options(ranks=str(place.rank) if kind == "alone" else "").text(),
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.ranks),
        }
        torch.set_num_threads(1)
        sys.argv = ["train.py", str(steps), kind, json.dumps(place.coordinates)]
        with tenure.watch(folder / kind, quiet=True):
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001  it must not go on as its parent would
        traceback.print_exc()
    os._exit(code)


class Models:
    """The recordings that the others are copies of."""

    def __init__(self, folder: Path, ranks: int, steps: int) -> None:
        stage = ranks // STAGES
        (folder / "train.py").write_text(PROGRAM)
        wanted = {
            "counted": Place(1, ranks),
            "lowest": Place(stage, ranks),
            "stage": Place(LEAKING * stage, ranks),
            "alone": outlier_of(ranks),
        }
        children = [start(folder, steps, place, kind) for kind, place in wanted.items()]
        ended = [os.waitpid(child, 0)[1] for child in children]
        if any(ended):
            sys.exit("the program that is recorded failed")
        self._files = {kind: next((folder / kind).glob("*.sqlite")) for kind in wanted}

    def of(self, place: Place) -> Path:
        if place == outlier_of(place.ranks):
            return self._files["alone"]
        if place.is_lowest:
            return self._files["stage" if place.leaks else "lowest"]
        return self._files["counted"]


def copy(model: Path, out: Path, place: Place, draw: random.Random) -> None:
    """A model's recording as that of another rank."""
    pid = 10_000 + place.rank
    path = out / f"{place.host}-{place.rank}-{pid}-0.sqlite"
    shutil.copyfile(model, path)
    told = {
        "rank": str(place.rank),
        "host": place.host,
        "pid": str(pid),
        "run": "generated",
        "coordinates": json.dumps(place.coordinates),
        "gpu": str(place.rank % GPUS),
    }
    with sqlite3.connect(path, isolation_level=None) as file:
        (level,) = file.execute("SELECT value FROM meta WHERE key='level'").fetchone()
        file.execute("PRAGMA journal_mode=DELETE")  # as a copy on another file system has it
        file.execute("BEGIN")
        file.executemany("INSERT OR REPLACE INTO meta VALUES(?, ?)", told.items())
        if level == "count":
            pace = round(PACE * draw.uniform(0.95, 1.05)) if place.leaks else 0
            more = draw.randrange(1 << 30)
            file.execute(
                "UPDATE steps SET held = held + :more + :pace * step, rss = rss + :more + :pace * "
                "step, peak = peak + :more + :pace * step",
                {"more": more, "pace": pace},
            )
        file.execute("COMMIT")
    file.close()


def generate(out: Path, ranks: int, steps: int) -> None:
    """The recordings of a job with one leaking stage and one rank that leaks by itself."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder), ranks, steps)
        for rank in track(range(ranks), "recordings", transient=True, disable=not _terminal()):
            place = Place(rank, ranks)
            copy(models.of(place), out, place, draw)


def _terminal() -> bool:
    return sys.stderr.isatty()


def parts(out: Path) -> Iterator[tuple[str, float]]:
    """What each part of judging takes, in this process."""
    begin = time.perf_counter()
    found = recordings.find([out])
    yield "find", time.perf_counter() - begin
    begin = time.perf_counter()
    verdict = recordings.judge(found)
    yield "judge", time.perf_counter() - begin
    begin = time.perf_counter()
    verdicts.first_screen(verdict)
    yield "first screen", time.perf_counter() - begin


def told(*words: str | Path) -> tuple[float, int, int, str]:
    """A command of Tenure's: seconds, the most bytes of its process, its status, what it said."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "tenure", *map(str, words)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said)
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return took, 1024 * used.ru_maxrss, process.returncode, said.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--out", type=Path, help="keep them there; default: nowhere")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--only-make", action="store_true", help="measure nothing; needs --out")
    options = parser.parse_args()
    if options.ranks < STAGES * GPUS or options.ranks % (STAGES * GPUS):
        sys.exit(f"--ranks must be a multiple of {STAGES * GPUS}")
    if options.only_make and not options.out:
        sys.exit("--only-make needs --out, or nothing would be left")
    if options.out and any(options.out.glob("*.sqlite")):
        sys.exit(f"{options.out} has recordings already: give --out an empty folder")
    with tempfile.TemporaryDirectory() as folder:
        out: Path = options.out or Path(folder) / "run.tenure"
        out.mkdir(parents=True, exist_ok=True)
        if options.only_make:
            generate(out, options.ranks, options.steps)
            return
        measure(out, options.ranks, options.steps)


def add_command(
    table: tables.Table, what: str, took: float, most: int, bars: tuple[float, float]
) -> None:
    holds = took <= bars[0] and most <= bars[1]
    table.add(
        [
            *(f"tenure {what}", f"{took:.1f}", f"{bars[0]:.0f}", f"{most / 1e6:.0f}"),
            *(f"{bars[1] / 1e6:.0f}", "holds" if holds else "MISSED"),
        ],
        what=what,
        seconds=took,
        peak_bytes=most,
        holds=holds,
    )


def measure(out: Path, ranks: int, steps: int) -> None:
    table = tables.Table("ranks", ["what", "seconds", "bar", "peak MB", "bar", ""])
    begin = time.perf_counter()
    generate(out, ranks, steps)
    made = time.perf_counter() - begin
    table.add([f"{ranks:,} recordings made", f"{made:.1f}"], what="generate", seconds=made)
    for what, seconds in parts(out):
        table.add([what, f"{seconds:.2f}"], what=what, seconds=seconds)
    took, most, code, said = told("check", out)
    add_command(table, "check", took, most, (BAR_SECONDS / 2, BAR_BYTES / 2))
    page = out.with_suffix(".html")
    took, most, *_ = told("report", out, "--out", page)
    add_command(table, "report", took, most, (BAR_SECONDS, BAR_BYTES))
    size = page.stat().st_size
    page.unlink()
    fits = "holds" if size <= BAR_PAGE else "MISSED"
    table.add(
        [f"bytes of its page: {size:,}, the bar {BAR_PAGE:,}", "", "", "", "", fits],
        what="page",
        bytes=size,
    )
    sizes = sorted(path.stat().st_size for path in out.glob("*.sqlite"))
    table.add(
        [f"bytes a recording: {sizes[len(sizes) // 2]:,}, the largest {sizes[-1]:,}"],
        what="bytes",
        median=sizes[len(sizes) // 2],
        most=sizes[-1],
    )
    print(said, end="")
    table.show()
    alone = outlier_of(ranks)
    stage = ranks // STAGES
    wanted = [
        f"ranks {LEAKING * stage}-{(LEAKING + 1) * stage - 1}, all stage {LEAKING}",
        f"rank {alone.rank}, stage 5",
        "received (local of main)",
        ".scores of Recall",
    ]
    missing = [text for text in wanted if text not in said]
    if code != 1 or missing:
        sys.exit(f"the first screen does not say {missing}: exit {code}")


if __name__ == "__main__":
    main()
