"""Recordings: reading what processes wrote, and judging it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure.errors import InputError
from tenure.inspect import local, verdicts

__all__ = [
    "SCHEMA",
    "document_of",
    "earlier_in",
    "files_in",
    "has_ended",
    "judge",
    "opened",
    "run_of",
]

SCHEMA = 1


def files_in(paths: Iterable[str | Path]) -> list[Path]:
    """The recordings that are meant: files, and in folders those of the latest run."""
    out: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            out += _runs(_all_in(path))[-1]
        elif path.is_file():
            out.append(path)
        else:
            raise InputError(f"{path} does not exist: give a recording or a folder of them")
    return out


def earlier_in(paths: Iterable[str | Path]) -> list[Path]:
    """The recordings of earlier runs, which :func:`files_in` leaves out."""
    folders = [path for path in map(Path, paths) if path.is_dir()]
    return [file for folder in folders for run in _runs(_all_in(folder))[:-1] for file in run]


def run_of(recording: Path) -> list[Path]:
    """All recordings of the run that this one is of."""
    folder = recording.parent
    return next(run for run in _runs(_all_in(folder)) if recording in run)


def _all_in(folder: Path) -> list[Path]:
    found = [*sorted(folder.glob("*.sqlite")), *local.left_behind(folder)]
    if not found:
        raise InputError(f"{folder} has no recordings: give a folder that `tenure run` made")
    return found


@dataclass
class _Run:
    ids: set[str]
    end: float
    files: list[Path]


def _runs(files: Iterable[Path]) -> list[list[Path]]:
    """Recordings by the run that they are of, the latest last.

    Those of one run say so, unless each was started by a `tenure run` of its own, as torchrun can
    do: but then their times overlap.
    """
    runs: list[_Run] = []
    for path, name, began, end in sorted(map(_span, files), key=lambda span: span[2]):
        same = [run for run in runs if (name and name in run.ids) or began <= run.end]
        merged = _Run({name}, end, [path])
        for run in same:
            merged = _Run(merged.ids | run.ids, max(merged.end, run.end), run.files + merged.files)
        runs = [*(run for run in runs if run not in same), merged]
    return [sorted(run.files) for run in runs]


def _span(path: Path) -> tuple[Path, str, float, float]:
    """A recording, its run's id, and when its process began and was last seen."""
    with opened(path) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('began', 'run')"))
        last = connection.execute("SELECT seconds FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        began = datetime.fromisoformat(meta["began"]).timestamp() if "began" in meta else 0.0
        return path, meta.get("run", ""), began, began + (last[0] if last else 0.0)


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A recording, for reading. Raises InputError for what is none, is damaged or is newer."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if head != b"SQLite format 3\x00":
        raise InputError(f"{path} is no recording: `tenure run` makes them")
    try:
        with closing(_connect(path)) as connection:
            _check_schema(path, connection)
            yield connection
    except InputError:
        raise
    except (sqlite3.Error, ValueError) as error:  # what is in it may be no JSON, or no number
        raise InputError(f"{path} is damaged or no recording: {error}") from None


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only; the log beside a recording that was cut off is read too, where that can be."""
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # In a folder that cannot be written to, SQLite cannot make the log's index.
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)
    return connection


def _check_schema(path: Path, connection: sqlite3.Connection) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    if not {"meta", "steps", "origins", "holdings"} <= tables:
        raise InputError(
            f"{path} is no recording, or was copied without the file {path.name}-wal beside it"
        )
    row = connection.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
    schema = int(row[0]) if row and str(row[0]).isdigit() else 0
    if schema > SCHEMA:
        raise InputError(
            f"{path} was recorded by a newer Tenure (schema {schema}, this one reads {SCHEMA}): "
            "update with pip install --upgrade tenure"
        )


def document_of(path: Path) -> verdicts.Document:
    """The verdict on one recording."""
    with opened(path) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM steps ORDER BY step")]
        cuts: dict[int, list[tuple[int, int, int, int]]] = {}
        for row in connection.execute(
            "SELECT origin, step, bytes, count, birth_steps FROM cuts ORDER BY origin, step"
        ):
            cuts.setdefault(row[0], []).append((row[1], row[2], row[3], row[4]))
        accused, bounded = (set(json.loads(meta.get(key, "[]"))) for key in ("accused", "bounded"))
        judged = _C.judge(rows, cuts, meta.get("unit", "step") == "step", accused, bounded)
        wanted = {suspect["origin"] for suspect in judged["suspects"]}
        origins = {
            row["id"]: dict(row)
            for row in connection.execute("SELECT * FROM origins")
            if row["id"] in wanted
        }
        holdings = {
            row["origin"]: json.loads(row["path"])
            for row in connection.execute("SELECT origin, path FROM holdings ORDER BY id")
        }
        for origin in origins.values():
            origin["device"] = _C.device_from_tag(origin["device"])
        process = {
            "rank": int(meta.get("rank", 0)),
            "host": meta.get("host", ""),
            "pid": int(meta.get("pid", 0)),
            "file": path.name,
            "unit": meta.get("unit", "step"),
            "cost": float(meta.get("cost", 0)),
            "left": int(meta["left"]) if meta.get("left") else None,
            "last": rows[-1]["step"] if rows else 0,
            "ended": meta.get("ended", ""),
            "coordinates": json.loads(meta.get("coordinates", "{}")),
            "cycles": json.loads(meta.get("cycles", "[]")),
        }
    return verdicts.document(judged, origins, holdings, process)


def has_ended(path: Path) -> bool:
    """Whether the process that wrote a recording is done with it."""
    with opened(path) as connection:
        return connection.execute("SELECT 1 FROM meta WHERE key='ended'").fetchone() is not None


def judge(paths: Iterable[str | Path]) -> verdicts.Document:
    """The verdict on all recordings that are meant."""
    return verdicts.merged([document_of(path) for path in files_in(paths)])


def peak_of(paths: Iterable[str | Path]) -> tuple[int, Any]:
    """The highest peak of any process: bytes, and its rank."""
    best: tuple[int, Any] = (0, 0)
    for path in files_in(paths):
        with opened(path) as connection:
            row = connection.execute(
                "SELECT max(max(peak, coalesce(device_allocated, 0))) FROM steps"
            )
            peak = row.fetchone()[0] or 0
            rank = connection.execute("SELECT value FROM meta WHERE key='rank'").fetchone()
            best = max(best, (int(peak), rank[0] if rank else 0))
    return best
