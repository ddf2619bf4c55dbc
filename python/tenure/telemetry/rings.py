"""Rings: the last figures of each rank of a run, read while they are written or afterwards.

A rank writes its ring from C++ (``tenure/telemetry/ring.h``). Nothing here imports torch or the
extension, for `tenure top` starts without them.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tenure.errors import InputError
from tenure.telemetry.presence import RING, folder_of, machine

__all__ = ["FAILED", "Identity", "Ring", "Rings", "newest", "read", "rings_of"]

FAILED = "failed: "  # begins why a rank has ended that did not end well
PATIENCE = 30.0  # seconds without a row until a rank is called silent, at the least
LATE = 5  # intervals without a row until then

_HEAD = struct.Struct("=8sIIIIIIQQ80s")
_MAGIC = b"tenring\0"
_VERSION = 1
_BEFORE_FIGURES = 4  # words of a slot: check, number, step, time
_BASE = 0x9E3779B97F4A7C15  # of the check: Note [A row is whole or not there] in ring.cpp
_ABSENT = -(2**63)
_MOST_SLOTS = 2**20
_MOST_FIGURES = 2**12
_MOST_TEXT = 2**20
_NUMBERS = ("rank", "ranks", "stage", "stages", "attempt", "pid", "started")
_NAMES = ("host", "role", "process_start", "machine")


@dataclass(frozen=True)
class Identity:
    """Who writes a ring."""

    host: str
    rank: int
    ranks: int
    stage: int
    stages: int
    role: str
    attempt: int
    pid: int
    started: int  # nanoseconds since 1970
    process_start: str  # ticks since boot: with it, `pid` is unmistakable
    machine: str  # a boot and a namespace, where process ids mean the same


@dataclass(frozen=True)
class Ring:
    """One rank, as its ring shows it.

    Rows are by the keys' names; ``step``, and ``when`` in nanoseconds since 1970, are always there,
    a figure that the rank does not have is not.
    """

    path: Path
    identity: Identity
    units: dict[str, str]
    rows: list[dict[str, int]]  # oldest first
    appended: int  # rows so far, most of them overwritten
    state: str  # "running", "silent", "died", "failed" or "ended"
    closed: str | None  # why it ended
    age: float  # seconds since the last row

    @property
    def alive(self) -> bool:
        """Whether more may come."""
        return self.state in {"running", "silent"}


def read(path: str | Path, last: int | None = None) -> Ring:
    """Reads one ring.

    Args:
        path: The file.
        last: How many rows, the newest; default: all that are there.

    Returns:
        What is whole in it: a row that was being written is left out.

    Raises:
        InputError: It is not there, cut, or no ring; the sentence names it.

    Example:
        >>> import tempfile
        >>> from tenure import _C
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with _C.TelemetryRing(folder, host="node7", rank=0, ranks=1) as ring:
        ...         ring.append(1, {"host_rss_bytes": 4096})
        ...     print(read(ring.path).rows[-1]["host_rss_bytes"])
        4096
    """
    return _Reader(Path(path)).look(last)


def rings_of(folder: str | Path, last: int | None = None) -> list[Ring]:
    """The newest ring of each rank in a folder, by rank; see :class:`Rings`."""
    return Rings(folder).look(last)


class Rings:
    """The rings of a folder, for who looks at them again and again: ranks come and go.

    Attributes:
        broken: Why files that are called rings could not be read at the last look.
    """

    def __init__(self, folder: str | Path) -> None:
        """Looks at nothing yet."""
        self.folder = Path(folder)
        self.broken: dict[Path, str] = {}
        self._readers: dict[Path, _Reader] = {}

    def look(self, last: int | None = None) -> list[Ring]:
        """The newest ring of each rank, by rank; raises InputError if there is no such folder."""
        found: list[Ring] = []
        self.broken = {}
        paths = self._paths()
        gone = self._readers.keys() - set(paths)
        for path in gone:
            del self._readers[path]
        for path in paths:
            reader = self._readers.get(path) or self._readers.setdefault(path, _Reader(path))
            try:
                found.append(reader.look(last))
            except InputError as error:
                self._readers.pop(path, None)
                if path.exists():  # else it went while we looked
                    self.broken[path] = str(error)
        return newest(found)

    def _paths(self) -> list[Path]:
        try:
            with os.scandir(self.folder) as entries:
                names = [e.name for e in entries if e.name.endswith(RING)]
        except NotADirectoryError:
            raise InputError(f"{self.folder} is a file: give the folder of a run") from None
        except FileNotFoundError:
            raise InputError(
                f"there is no folder {self.folder}: give the one that the run's Monitor writes to"
            ) from None
        except OSError as error:
            raise InputError(f"cannot read {self.folder}: {error.strerror}") from None
        return [self.folder / name for name in names if not name.startswith(".")]

    @classmethod
    def of_run(cls, folder: str | Path) -> Rings:
        """Those in the folder of a run."""
        return cls(folder_of(folder))


def newest(found: Iterable[Ring]) -> list[Ring]:
    """Of several attempts of a rank the last one, by rank; and no ranks of a larger run before."""
    of_rank: dict[int, Ring] = {}
    for ring in found:
        known = of_rank.get(ring.identity.rank)
        if known is None or _order(ring) > _order(known):
            of_rank[ring.identity.rank] = ring
    if not of_rank:
        return []
    ranks = max(of_rank.values(), key=_order).identity.ranks
    return [of_rank[rank] for rank in sorted(of_rank) if rank < ranks or of_rank[rank].alive]


def _order(ring: Ring) -> tuple[int, int]:
    return ring.identity.started, ring.identity.attempt


class _Reader:
    """One file. What its head says is read once: it never changes, nor does the size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._rows: list[dict[str, int]] = []
        self._rows_are: tuple[int, int | None] | None = None  # as of so many, the last so many

    def look(self, last: int | None) -> Ring:
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(file)
                if self._inode != status.st_ino:  # another ring took its place
                    self._read_head(file, status.st_size)
                    self._inode = status.st_ino
                return self._look(file, last)
            finally:
                os.close(file)
        except OSError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror}") from None

    def _read_head(self, file: int, size: int) -> None:
        head = os.pread(file, _HEAD.size, 0)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise InputError(f"{self._path} is no ring of samples")
        _, version, text, begin, width, slots, figures, *_ = _HEAD.unpack(head)
        if version != _VERSION:
            raise InputError(
                f"{self._path} is a ring of version {version}, and this Tenure reads {_VERSION}: "
                "use the one that wrote it"
            )
        sound = (
            text <= _MOST_TEXT
            and begin >= _HEAD.size + text
            and 0 < slots <= _MOST_SLOTS
            and figures <= _MOST_FIGURES
            and width == 8 * (_BEFORE_FIGURES + figures)
        )
        if not sound:
            raise InputError(f"{self._path} is a damaged ring: its head makes no sense")
        if size < begin + slots * width:
            raise InputError(
                f"{self._path} is cut: {size:,} bytes of {begin + slots * width:,} are there"
            )
        self._begin, self._width, self._slots = begin, width, slots
        self._rows_are = None
        self._read_text(os.pread(file, text, _HEAD.size), figures)
        powers = np.full(width // 8 - 1, _BASE, np.uint64)
        powers[0] = 1
        self._weights = np.cumprod(powers, dtype=np.uint64)[::-1]

    def _read_text(self, text: bytes, figures: int) -> None:
        given: dict[str, str] = {}
        units: dict[str, str] = {}
        for line in text.decode(errors="replace").splitlines():
            name, *values = line.split("\t")
            if name == "key" and len(values) == 2:
                units[values[0]] = values[1]
            elif values:
                given[name] = values[0]
        try:
            numbers = {name: int(given[name]) for name in _NUMBERS}
            names = {name: given[name] for name in _NAMES}
            self._identity = Identity(**numbers, **names)  # type: ignore[arg-type]
        except (KeyError, ValueError):
            raise InputError(f"{self._path} is a damaged ring: it does not say whose") from None
        if len(units) != figures:
            raise InputError(f"{self._path} is a damaged ring: figures without a name")
        self._units = units
        self._names = list(units)

    def _look(self, file: int, last: int | None) -> Ring:
        *_, appended, closed, reason = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
        if self._rows_are != (appended, last):
            self._rows, self._rows_are = self._read_rows(file, appended, last), (appended, last)
        rows = self._rows
        now = time.time()
        latest = rows[-1]["when"] if rows else self._identity.started
        age = max(0.0, now - latest / 1e9)
        interval = (latest - rows[-2]["when"]) / 1e9 if len(rows) > 1 else 0.0
        why = reason.rstrip(b"\0").decode(errors="replace")
        late = age > _patience(interval)
        state = _state(self._identity, why, closed=bool(closed), late=late)
        told = why if state in {"failed", "ended"} else None
        return Ring(self._path, self._identity, self._units, rows, appended, state, told, age)

    def _read_rows(self, file: int, appended: int, last: int | None) -> list[dict[str, int]]:
        count = min(self._slots, appended, self._slots if last is None else last + 1)
        if count == self._slots or last is None:
            data = os.pread(file, self._slots * self._width, self._begin)
        else:  # one more than asked for: the newest may be about to be written
            numbers = range(appended - count, appended)
            data = b"".join(
                os.pread(file, self._width, self._begin + number % self._slots * self._width)
                for number in numbers
            )
        words = np.frombuffer(data[: len(data) // self._width * self._width], np.uint64)
        words = words.reshape(-1, self._width // 8)
        whole = words[self._is_whole(words)]
        whole = whole[np.argsort(whole[:, 1], kind="stable")]
        return [self._row(values) for values in whole.view(np.int64).tolist()][-(last or 0) :]

    def _is_whole(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        check = (words[:, 1:] * self._weights).sum(axis=1, dtype=np.uint64)
        whole: npt.NDArray[np.bool_] = (words[:, 0] == check) & (words[:, 1] != 0)
        return whole

    def _row(self, values: list[int]) -> dict[str, int]:
        figures = zip(self._names, values[_BEFORE_FIGURES:], strict=True)
        row = {name: value for name, value in figures if value != _ABSENT}
        return row | {"step": values[2], "when": values[3]}


def _patience(interval: float) -> float:
    return max(PATIENCE, LATE * interval)


def _state(identity: Identity, why: str, *, closed: bool, late: bool) -> str:
    is_gone = closed or _process_runs(identity) is False
    if is_gone and why.startswith(FAILED):
        return "failed"
    if is_gone:
        return "ended" if closed else "died"
    return "silent" if late else "running"


def _process_runs(identity: Identity) -> bool | None:
    """None where it cannot be known from here."""
    here = identity.machine == machine() if identity.machine else identity.host == _host()
    if not here:
        return None
    try:
        with open(f"/proc/{identity.pid}/stat", errors="replace") as file:  # noqa: PTH123  faster
            stat = file.read()
    except OSError:
        return _answers(identity.pid)
    fields = stat.rpartition(")")[2].split()
    is_other = bool(identity.process_start) and fields[19] != identity.process_start
    return not is_other and fields[0] not in {"Z", "X"}


def _answers(pid: int) -> bool:
    """Whether there is such a process, where /proc does not show those of other users."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


@functools.cache
def _host() -> str:
    return socket.gethostname()
