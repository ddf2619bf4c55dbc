"""Who is there: a small file for each rank of a live job, which a rank that was killed leaves.

Files of one process share a name, ``{host}-{rank}-{pid}-{attempt}``: ``.live`` while it runs,
``.flight.json`` its snapshot, ``.ring`` its last samples.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tenure.inspect.files import whole
from tenure.inspect.options import job_of

__all__ = [
    "FLIGHT",
    "LIVE",
    "REQUEST",
    "RING",
    "Presence",
    "folder_of",
    "is_alive",
    "machine",
    "present_in",
    "this_process",
]

LIVE, FLIGHT, RING = ".live", ".flight.json", ".ring"
REQUEST = "dump.request"  # in the folder: asks all ranks for their snapshots


@dataclass(frozen=True)
class Presence:
    """One rank of a job, as it tells of itself.

    Attributes:
        began: When it was there first, in seconds since 1970.
        started: When the kernel started the process, in its own unit: ids are used again.
        job: What ranks of one launcher have in common.
        machine: Where process ids mean the same: a boot and a namespace. Containers may share a
            host's name and no ids.
    """

    host: str
    rank: int
    ranks: int
    stage: int
    stages: int
    pid: int
    attempt: int
    began: float
    started: int
    job: str = ""
    machine: str = ""

    @property
    def stem(self) -> str:
        """How its files are called, less their endings."""
        return f"{self.host}-{self.rank}-{self.pid}-{self.attempt}"

    def file(self, folder: Path, ending: str) -> Path:
        """One of its files."""
        return folder / f"{self.stem}{ending}"

    def as_json(self) -> dict[str, Any]:
        """As it is in its files."""
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Presence:
        """From one of its files. Raises KeyError or TypeError for what is none."""
        told = {"machine": "", **told}
        return cls(**{name: told[name] for name in cls.__dataclass_fields__})

    def write(self, folder: Path) -> None:
        """Says that it is there."""
        with whole(self.file(folder, LIVE)) as file:
            json.dump(self.as_json(), file)


def this_process(rank: int, ranks: int, stage: int, stages: int) -> Presence:
    """The presence of this process."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return Presence(
        host=socket.gethostname().replace("/", "_") or "host",
        rank=rank,
        ranks=ranks,
        stage=stage,
        stages=stages,
        pid=os.getpid(),
        attempt=int(attempt) if attempt.isdigit() else 0,
        began=time.time(),
        started=_started(os.getpid()) or 0,
        job=job_of(),
        machine=machine(),
    )


def present_in(folder: Path) -> list[Presence]:
    """All that have said that they are there and not that they left, by rank."""
    found = []
    for file in folder.glob(f"*{LIVE}"):
        try:
            found.append(Presence.of(json.loads(file.read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it left while we looked, or is no file of ours
    return sorted(found, key=lambda one: (one.rank, one.began))


def folder_of(run: str | Path) -> Path:
    """Where monitors of a run keep their files: in its folder, or where `tenure train` has them."""
    inside = Path(run) / "memory"
    return inside if inside.is_dir() else Path(run)


def is_alive(one: Presence) -> bool | None:
    """Whether its process runs; None where that cannot be seen: another host or container."""
    host = socket.gethostname().replace("/", "_") or "host"
    if one.machine != machine() if one.machine else one.host != host:
        return None
    return _started(one.pid) == one.started


@functools.cache
def machine() -> str:
    """Where process ids mean what they mean here; empty where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When the process was started, in the kernel's unit; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
