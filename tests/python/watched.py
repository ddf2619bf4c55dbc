"""Running programs under `tenure run`, and reading what came of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "zoo"
# oneDNN keeps up to 1,024 kernels, one a shape: on aarch64, where torch uses it for most operators,
# programs with varying shapes really grow for as long, and that is not what they are here to show.
QUIET = {"OMP_NUM_THREADS": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}


@dataclass
class Run:
    """How a watched program ended."""

    code: int
    out: str
    err: str
    folder: Path
    verdict: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> dict[str, Any]:
        """The first suspect."""
        assert self.verdict["suspects"], self.err
        suspect: dict[str, Any] = self.verdict["suspects"][0]
        return suspect


def tenure_run(
    program: list[str], folder: Path, *options: str, timeout: float = 180.0, **variables: str
) -> Run:
    """`tenure run program`, with its recordings and verdict in `folder`."""
    command = [sys.executable, "-m", "tenure", "run", "--out", str(folder / "run.tenure")]
    verdict = folder / "verdict.json"
    ended = subprocess.run(
        [*command, "--json", str(verdict), *options, "--", *program],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={**os.environ, **QUIET, **variables},
    )
    found = json.loads(verdict.read_text()) if verdict.exists() else {}
    return Run(ended.returncode, ended.stdout, ended.stderr, folder / "run.tenure", found)


class Batch:
    """Many programs, two at a time: started together, asked for one by one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._runs: dict[tuple[str, ...], Future[Run]] = {}

    def start(self, *program: str) -> None:
        folder = self._folder / re.sub(r"\W+", "-", "-".join(program[-2:]))
        folder.mkdir()
        self._runs[program] = self._pool.submit(tenure_run, list(program), folder)

    def result(self, *program: str) -> Run:
        return self._runs[program].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Nursery:
    """Programs as processes of their own that share the import of torch: see nursery.py."""

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self._folder = folder
        self._jobs: list[dict[str, Any]] = []
        self._runs: list[Run] = []
        self._most = most or os.cpu_count() or 1

    def add(self, program: Path, *arguments: str, **options: str) -> int:
        """One more program; returns its number. `options` are of the variable TENURE."""
        number = len(self._jobs)
        cwd = self._folder / f"{number}-{program.stem}"
        cwd.mkdir()
        chosen = {
            "level": "trace",
            "out": str(cwd / "run.tenure"),
            "json": str(cwd / "verdict.json"),
            **options,
        }
        env = {"TENURE": urlencode(chosen)}
        files = {"out": str(cwd / "out"), "err": str(cwd / "err")}
        job = {"program": str(program), "arguments": arguments, "cwd": str(cwd), "env": env}
        self._jobs.append({**job, **files})
        return number

    def run(self, timeout: float = 600.0) -> list[Run]:
        """Runs all of them, and returns them in order."""
        ended = subprocess.run(
            [sys.executable, Path(__file__).with_name("nursery.py"), str(self._most)],
            input="".join(json.dumps(job) + "\n" for job in self._jobs),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **QUIET},
        )
        assert ended.returncode == 0, ended.stderr
        codes = {end["at"]: end["code"] for end in map(json.loads, ended.stdout.splitlines())}
        return [self._run(number, codes[number]) for number in range(len(self._jobs))]

    def _run(self, number: int, code: int) -> Run:
        job = self._jobs[number]
        folder = Path(job["cwd"])
        verdict = folder / "verdict.json"
        found = json.loads(verdict.read_text()) if verdict.exists() else {}
        out, err = Path(job["out"]).read_text(), Path(job["err"]).read_text()
        return Run(code, out, err, folder / "run.tenure", found)


@dataclass
class Marks:
    """What the comments in a program of the zoo say that a diagnosis has to find."""

    born: list[str]  # file:line
    kept: list[str]
    holder: str
    cycle: bool

    @classmethod
    def of(cls, path: Path) -> Marks:
        lines = path.read_text().splitlines()

        def marked(word: str) -> list[str]:
            pattern = re.compile(rf"#.*\b{word}\b")
            return [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if pattern.search(line)]

        holders = [line.split("holder:")[1].strip() for line in lines if "# holder:" in line]
        return cls(marked("born"), marked("kept"), holders[0], "# cycle: yes" in lines)
