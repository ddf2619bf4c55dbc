"""Running programs under `tenure run`, and reading what came of it."""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from typer.testing import CliRunner

from forks import run_forked
from tenure.cli import app

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
    command = ["-m", "tenure", "run", "--out", str(folder / "run.tenure")]
    verdict = folder / "verdict.json"
    ended = run_forked(
        [*command, "--json", str(verdict), *options, "--", *program],
        timeout=timeout,
        cwd=folder,
        env={**os.environ, **QUIET, **variables},
    )
    found = json.loads(verdict.read_text()) if verdict.exists() else {}
    return Run(ended.returncode, ended.stdout, ended.stderr, folder / "run.tenure", found)


def tenure_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command `tenure` in this process, which has imported torch already."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


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


class _Server:
    """The process of nursery.py, which all tests of this process share."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("nursery.py"), str(os.cpu_count())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **QUIET},
            start_new_session=True,
        )
        self._sent = 0
        self._codes: dict[int, int] = {}
        self._output = b""
        atexit.register(self.end)

    def send(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        self._sent += 1
        return self._sent - 1

    def code(self, number: int, deadline: float) -> int:
        """The exit code of a job, once it has ended."""
        assert self._process.stdout is not None
        while number not in self._codes:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(left, 0.0))
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                self.end()
                raise TimeoutError("the nursery " + ("ended" if ready else "takes too long"))
            *lines, self._output = (self._output + part).split(b"\n")
            self._codes.update((end["at"], end["code"]) for end in map(json.loads, lines))
        return self._codes.pop(number)

    def end(self) -> None:
        """Ends it, and with it all that it runs."""
        global _server
        _server = None
        with self._process:  # closes its input, and waits
            pass


_server: _Server | None = None


class Nursery:
    """Programs as processes of their own that share the import of torch: see nursery.py."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[dict[str, Any]] = []

    def add(self, program: Path, *arguments: str, in_haste: bool = True, **options: str) -> int:
        """One more program; returns its number. `options` are of the variable TENURE.

        One in haste does not take its interpreter to pieces at the end, which takes about a second.
        """
        number = len(self._jobs)
        cwd = self._folder / f"{number}-{program.stem}"
        cwd.mkdir()
        self._jobs.append(_job(program, cwd, arguments, options, in_haste))
        return number

    def run(self, timeout: float = 600.0) -> list[Run]:
        """Runs all of them, and returns them in order."""
        return _run_jobs(self._jobs, timeout)


def forked_run(
    program: list[str], folder: Path, *, timeout: float = 180.0, level: str = "trace"
) -> Run:
    """What `tenure_run` does, in a process that is forked from one that has imported torch.

    For tests of what is found in a program, and not of how its process starts and ends.
    """
    script, *arguments = program
    job = _job(folder / script, folder, arguments, {"level": level}, in_haste=True)
    return _run_jobs([job], timeout)[0]


def _job(
    program: Path, cwd: Path, arguments: Sequence[str], options: dict[str, str], in_haste: bool
) -> dict[str, Any]:
    chosen = {
        "level": "trace",
        "out": str(cwd / "run.tenure"),
        "json": str(cwd / "verdict.json"),
        "run": secrets.token_hex(8),
        **options,
    }
    return {
        "program": str(program),
        "arguments": arguments,
        "cwd": str(cwd),
        "env": {"TENURE": urlencode(chosen)},
        "out": str(cwd / "out"),
        "err": str(cwd / "err"),
        "in_haste": in_haste,
    }


def _run_jobs(jobs: list[dict[str, Any]], timeout: float) -> list[Run]:
    global _server
    _server = server = _server or _Server()
    deadline = time.monotonic() + timeout
    numbers = [server.send(job) for job in jobs]
    codes = [server.code(number, deadline) for number in numbers]
    return [_run_of(job, code) for job, code in zip(jobs, codes, strict=True)]


def _run_of(job: dict[str, Any], code: int) -> Run:
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
