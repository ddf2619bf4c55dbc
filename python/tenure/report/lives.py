"""The lives of storages, as a recording has them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure.inspect import recordings

__all__ = ["KINDS", "Life", "Recorded", "in_order", "opened"]

KINDS = (
    *("parameter", "gradient", "optimizer", "activation"),
    *("communication", "temporary", "other"),
)


@dataclass(frozen=True)
class Life:
    """One storage, from birth to death.

    Attributes:
        number: Its id in the recording.
        nbytes: Its size.
        device: ``cpu``, ``cuda:0`` …
        born: Seconds since watching began; negative if it was there before.
        died: The same; None if it was alive at the end.
        born_step: The step in which it was made.
        died_step: The step in which it died; None if it was alive at the end.
        origin: ``op``, ``module``, ``phase``, ``site`` and ``forward_site``.
        kind: What it was to the program, one of `KINDS`.
        name: That of the parameter, or of what belongs to it; mostly empty.
    """

    number: int
    nbytes: int
    device: str
    born: float
    died: float | None
    born_step: int
    died_step: int | None
    origin: dict[str, str]
    kind: str
    name: str


class Recorded:
    """One recording that is open for reading.

    Attributes:
        path: The file.
        meta: What it says of its process.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Reads what there is to know of the process."""
        self.path = path
        self._connection = connection
        connection.row_factory = sqlite3.Row
        meta = connection.execute("SELECT key, value FROM meta")
        self.meta: dict[str, str] = {row["key"]: row["value"] for row in meta}
        self._origins = {
            row["id"]: dict(row) for row in connection.execute("SELECT * FROM origins")
        }
        self._marks = {row["storage"]: (row["kind"], row["name"]) for row in self._rows("kinds")}

    def _rows(self, table: str) -> Iterator[sqlite3.Row]:
        """Of a table that recordings of an older Tenure do not have."""
        wanted = self._connection.execute("SELECT 1 FROM sqlite_master WHERE name=?", [table])
        if wanted.fetchone():
            yield from self._connection.execute(f"SELECT * FROM {table}")

    @property
    def rank(self) -> int:
        """The rank that the launcher gave the process, or 0."""
        return int(self.meta.get("rank", 0))

    @property
    def name(self) -> str:
        """As a person would name the process."""
        return f"rank {self.rank} ({self.meta.get('host', '?')}, pid {self.meta.get('pid', '?')})"

    def steps(self) -> Iterator[dict[str, Any]]:
        """The rows of the table ``steps``, in order."""
        for row in self._connection.execute("SELECT * FROM steps ORDER BY step"):
            yield dict(row)

    def step_before(self, step: int) -> int:
        """The last step before it that has a row; -1 if none has."""
        sql = "SELECT max(step) FROM steps WHERE step < ?"
        (found,) = self._connection.execute(sql, [step]).fetchone()
        return -1 if found is None else int(found)

    def lives(self) -> Iterator[Life]:
        """Every storage that is in the recording, in the order of birth."""
        began = int(self.meta.get("began_ns", 0))
        last = self._connection.execute("SELECT max(step) FROM steps").fetchone()[0] or 0
        for row in self._connection.execute("SELECT * FROM storages ORDER BY born_ns, id"):
            origin = self._origins.get(row["origin"], {})
            # What was there at the end of the last step and dies after it dies because the program
            # ends.
            ended = row["born_step"] <= last < (row["died_step"] or 0)
            dead = row["died_step"] is not None and not ended
            died_step = row["died_step"] if dead else None
            kind, name = self._marks.get(row["id"]) or (_kind(dict(row), origin, died_step), "")
            yield Life(
                row["id"],
                row["bytes"],
                _device(origin.get("device", 0)),
                (row["born_ns"] - began) / 1e9,
                (row["died_ns"] - began) / 1e9 if dead else None,
                row["born_step"],
                died_step,
                {key: origin.get(key) or "" for key in _TOLD},
                kind,
                name,
            )


def _kind(row: dict[str, Any], origin: dict[str, Any], died_step: int | None) -> str:
    """From where it was made and when it died, for all that no module or optimizer has."""
    outlived = died_step is None or died_step > row["born_step"]
    if origin.get("communication"):
        return "communication"
    match origin.get("phase"):
        case "forward" if row.get("died_in_backward") or outlived:
            return "activation"
        case "backward" if not row.get("died_in_backward"):
            return "gradient"
        case "optimizer" if outlived:
            return "optimizer"
        case "other" if outlived:
            return "other"
    return "temporary"


def _device(tag: int) -> str:
    return str(_C.device_from_tag(tag)) if tag else "cpu"


_TOLD = ("op", "module", "phase", "site", "forward_site")


@contextmanager
def opened(path: Path) -> Iterator[Recorded]:
    """A recording, for reading. Raises InputError for what is none."""
    with recordings.opened(path) as connection:
        yield Recorded(path, connection)


def in_order(lives: Iterable[Life]) -> list[tuple[float, bool, Life]]:
    """Births and deaths in the order of time: when, whether it is a birth, and whose."""
    out: list[tuple[float, bool, Life]] = []
    for life in lives:
        out.append((life.born, True, life))
        if life.died is not None:
            out.append((max(life.born, life.died), False, life))
    # Of those at one time, deaths of what is older come first, then births in order, then deaths of
    # what was just born.
    out.sort(key=lambda event: (event[0], not event[1] and event[2].born == event[0], event[1]))
    return out
