"""The arms of bench/store.py: their processes, and how the bench speaks with them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from store_child import rollup

BENCH = Path(__file__).resolve().parent
BUILD = BENCH.parent / "build"
START = (
    "import json, sys; address, kind, role, number, setting = sys.argv[1:]; "
    f"sys.path.append({str(BENCH)!r}); import store_child; "
    "store_child.obey(address, kind, role, int(number), json.loads(setting))"
)
PATIENCE = 300.0  # seconds that a call may take


class ArmFailed(Exception):  # noqa: N818  it is what happened
    """The arm cannot be measured; says why."""


@dataclass(frozen=True)
class Kind:
    """What an arm is made of."""

    name: str
    side: str
    environment: str | None = None  # under build/, else the Python that runs this
    wire: str | None = None
    alone: bool = False  # the process that puts is the one that gets
    head: str | None = None  # a process that starts the others

    @property
    def python(self) -> str:
        if self.environment is None:
            return sys.executable
        return str(BUILD / self.environment / "bin/python")

    @property
    def missing(self) -> str | None:
        """Why it cannot even be started."""
        if self.environment and not Path(self.python).exists():
            peer = self.environment.removeprefix("peers-")
            return f"not installed: scripts/peers {peer}"
        return None


KINDS = [
    Kind("same host", "Tenure"),
    Kind("TCP", "Tenure", wire="tcp"),
    Kind("socket", "Socket"),
    Kind("RTensor", "RTensor", environment="peers-areal"),
    Kind("Ray", "Ray", head="RayHead"),
    Kind("Mooncake", "Mooncake", environment="peers-mooncake"),
    Kind("torchstore", "Torchstore", environment="peers-torchstore", alone=True),
]


class Process:
    """One side, in a process of its own."""

    def __init__(self, link: Connection, log: Path) -> None:
        self._link = link
        self._log = log
        self.about: dict[str, Any] = self.answer()

    def ask(self, method: str, *args: Any) -> None:
        self._link.send((method, args))

    def answer(self) -> Any:
        try:
            if not self._link.poll(PATIENCE):
                raise ArmFailed(f"no answer within {PATIENCE:.0f} s")
            how, value = self._link.recv()
        except (EOFError, ConnectionError) as error:
            raise ArmFailed(f"the process ended: {self._last_words()}") from error
        if how == "failed":
            raise ArmFailed(str(value))
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.ask(method, *args)
        return self.answer()

    def hang_up(self) -> None:
        self._link.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Arm:
    """One way to have a tensor in another process: a producer, and consumers when asked for."""

    def __init__(self, kind: Kind) -> None:
        if kind.missing:
            raise ArmFailed(kind.missing)
        self.kind = kind
        self.name = kind.name
        self._folder = tempfile.TemporaryDirectory(prefix="tenure-bench-")
        self._address = str(Path(self._folder.name) / "bench")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self._address)
        self._listening.listen()
        self._listening.settimeout(1.0)
        self._children: list[subprocess.Popen[bytes]] = []
        self._sides: list[Process] = []
        self.consumers: list[Process] = []
        try:
            if kind.head:
                self._head = self._launch(kind.head, "head", 0, None)
            self.producer = self._start("producer", 0)
            self.version: str = self.producer.about["version"]
            self.add_consumer()
        except BaseException:
            self.close()
            raise

    def add_consumer(self) -> None:
        if self.kind.alone:
            if self.consumers:
                raise ArmFailed("only the process that puts can get")
            self.consumers.append(self.producer)
        else:
            self.consumers.append(self._start("consumer", len(self.consumers) + 1))

    @property
    def consumer(self) -> Process:
        return self.consumers[0]

    @property
    def pss(self) -> int:
        """Bytes of all its processes; what several have mapped counts once."""
        total = 0
        for pid in _family([child.pid for child in self._children]):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += rollup("Pss", pid)
        return total

    def close(self) -> None:
        for side in self._sides:
            side.hang_up()
        self._listening.close()
        for child in self._children:
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._folder.cleanup()

    def _start(self, role: str, number: int) -> Process:
        if self.kind.head:
            self._head.call("spawn", self._address, role, number)
            return self._accepted(self._log("head", 0))
        setting = {"wire": self.kind.wire}
        if role == "consumer":
            setting |= self.producer.about.get("setting", {})
        return self._launch(self.kind.side, role, number, setting)

    def _launch(self, side: str, role: str, number: int, setting: Any) -> Process:
        log = self._log(role, number)
        words = [self._address, side, role, str(number), json.dumps(setting)]
        with log.open("wb") as out:
            self._children.append(
                subprocess.Popen(
                    [self.kind.python, "-c", START, *words],
                    stdout=out,
                    stderr=out,
                    env=_environment(self.kind),
                )
            )
        return self._accepted(log)

    def _accepted(self, log: Path) -> Process:
        child = self._children[-1]
        for _ in range(120):
            with contextlib.suppress(TimeoutError):
                link, _address = self._listening.accept()
                side = Process(Connection(link.detach()), log)
                self._sides.append(side)
                return side
            if child.poll() is not None:
                break
        raise ArmFailed(f"its process did not start: {log.read_text(errors='replace')[-300:]}")

    def _log(self, role: str, number: int) -> Path:
        return Path(self._folder.name) / f"{role}{number}.log"


SECRET = secrets.token_hex(32)


def _environment(kind: Kind) -> dict[str, str]:
    found = dict(os.environ, TENURE_STORE_SECRET=SECRET, OMP_NUM_THREADS="1")
    found["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # or Ray warns
    if kind.environment:
        libraries = {
            str(file.parent) for file in (BUILD / kind.environment).glob("debian/**/*.so*")
        }
        if libraries:
            found["LD_LIBRARY_PATH"] = ":".join(sorted(libraries))
    return found


def _family(pids: list[int]) -> set[int]:
    """These processes and all that descend from them."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@contextlib.contextmanager
def started(kinds: list[Kind], missing: dict[str, str]) -> Iterator[list[Arm]]:
    """Those that can be had; `missing` says why the others cannot."""
    arms: list[Arm] = []
    try:
        for kind in kinds:
            if kind.name in missing:
                continue
            try:
                arms.append(Arm(kind))
            except ArmFailed as failed:
                missing[kind.name] = str(failed)
        yield arms
    finally:
        for arm in arms:
            arm.close()
