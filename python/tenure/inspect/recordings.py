"""Recordings: reading what processes wrote, and judging it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure.errors import InputError
from tenure.inspect import local, opening, verdicts
from tenure.inspect.evidence import Evidence, Given
from tenure.inspect.opening import SCHEMA, opened
from tenure.inspect.runs import Head, by_run

__all__ = [
    "SCHEMA",
    "Found",
    "Meant",
    "document_of",
    "documents",
    "earlier_in",
    "files_in",
    "find",
    "has_ended",
    "judge",
    "last_step_of",
    "listed",
    "opened",
    "peak_of",
    "run_of",
    "together",
]

_AT_ONCE = 64  # recordings between two reports of progress
_MOST_THREADS = 16


@dataclass(frozen=True)
class Found:
    """Which recordings are meant.

    Attributes:
        files: Those of the run that is to be judged.
        earlier: Those of earlier runs in the same folders, which are left out.
        broken: What cannot be read, and why.
        meta: By file, what it says of its process.
    """

    files: list[Path]
    earlier: list[Path]
    broken: dict[Path, str]
    meta: dict[Path, dict[str, str]]

    @property
    def inputs(self) -> list[Path]:
        """Every recording that is there, read or left out."""
        return [*self.files, *self.earlier, *self.broken]


Meant = Iterable[str | Path] | Found
Progress = Callable[[int, int], None]  # recordings that are done, of how many


def find(paths: Meant) -> Found:
    """The recordings that are meant: files, and in folders those of the latest run.

    One that cannot be read, or is damaged in any of its tables, does not hide the others.

    Raises:
        InputError: None can be read, or they are of several runs.
    """
    if isinstance(paths, Found):
        return paths
    named: list[Path] = []
    heads: list[Head] = []
    broken: dict[Path, str] = {}
    earlier: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = _heads(_all_in(path), broken)
            runs = by_run(found)
            heads += runs[-1] if runs else []
            earlier += [head.path for run in runs[:-1] for head in run]
        elif path.is_file():
            named.append(path)
        else:
            raise InputError(f"{path} does not exist: give a recording or a folder of them")
    heads += _heads(named, broken)
    heads = _sound(heads, broken)
    if not heads:
        first = next(iter(broken.values()))
        all_of_them = f"none of {len(broken):,} recordings can be read: "
        raise InputError(f"{all_of_them if len(broken) > 1 else ''}{first}")
    _check_that_they_are_one_run(by_run(heads))
    meta = {head.path: head.meta for head in heads}
    return Found(list(meta), earlier, broken, meta)


def _heads(files: Iterable[Path], broken: dict[Path, str]) -> list[Head]:
    out = []
    for path in files:
        try:
            out.append(_head(path))
        except InputError as error:
            broken[path] = str(error)
    return out


def _sound(heads: Iterable[Head], broken: dict[Path, str]) -> list[Head]:
    """Those whose tables have what verdicts and reports need; `broken` says why others have not."""
    out = []
    for head in heads:
        why = opening.what_is_wrong(head.path)
        if why:
            broken[head.path] = why
        else:
            out.append(head)
    return out


def _check_that_they_are_one_run(runs: list[list[Head]]) -> None:
    if len(runs) > 1:
        began = [min(run, key=lambda head: head.began) for run in runs]
        told = [f"{head.path.name} ({head.meta.get('began', '?')[:19]})" for head in began[-3:]]
        raise InputError(
            f"these recordings are of {len(runs)} runs, which began with {', '.join(told)}: "
            "give those of one"
        )


def files_in(paths: Meant) -> list[Path]:
    """The recordings that are meant and can be read."""
    return find(paths).files


def earlier_in(paths: Meant) -> list[Path]:
    """The recordings of earlier runs, which :func:`files_in` leaves out."""
    return find(paths).earlier


def run_of(recording: Path) -> list[Path]:
    """All recordings of the run that this one is of."""
    heads = _heads(_all_in(recording.parent), {})
    run = next((run for run in by_run(heads) if any(h.path == recording for h in run)), [])
    return [head.path for head in run] or [recording]


def listed(folder: Path) -> list[Path]:
    """All files in a folder that could be recordings, whatever is in them."""
    return [*sorted(folder.glob("*.sqlite")), *local.left_behind(folder)]


def _all_in(folder: Path) -> list[Path]:
    found = listed(folder)
    if not found:
        raise InputError(f"{folder} has no recordings: give a folder that `tenure run` made")
    return found


def _head(path: Path) -> Head:
    with opened(path) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        last = connection.execute("SELECT seconds FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        began = datetime.fromisoformat(meta["began"]).timestamp() if "began" in meta else 0.0
        return Head(path, meta, began, began + (last[0] if last else 0.0))


def document_of(path: Path) -> verdicts.Document:
    """The verdict on one recording. Raises InputError for what cannot be read."""
    (made,) = _documents({path: _head(path).meta})
    if isinstance(made, InputError):
        raise made
    return made


def _documents(meta: Mapping[Path, dict[str, str]]) -> list[verdicts.Document | InputError]:
    """The verdict on each recording, or what is wrong with it."""
    cases: dict[Path, tuple[str, bool, Given]] = {}
    out: dict[Path, verdicts.Document | InputError] = {}
    for path, told in meta.items():
        try:
            steps = told.get("unit", "step") == "step"
            cases[path] = (str(path.resolve()), steps, Evidence.of(told).given())
        except (TypeError, ValueError) as error:
            out[path] = opening.damaged(path, error)
    for path, judged in zip(cases, _judged(list(cases.values())), strict=True):
        out[path] = _document(path, judged, meta[path])
    return [out[path] for path in meta]


def _document(
    path: Path, judged: dict[str, Any] | str, meta: Mapping[str, str]
) -> verdicts.Document | InputError:
    if isinstance(judged, str):
        return opening.damaged(path, judged)
    try:
        process = _process(path, meta, judged["last"])
        wanted = {one["origin"] for one in (*judged["suspects"], *judged["filling"])}
        origins, holdings = _origins_and_holdings(path, wanted) if wanted else ({}, {})
        return verdicts.document(judged, origins, holdings, process)
    except InputError as error:
        return error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return opening.damaged(path, error)


def _judged(
    cases: list[tuple[str, bool, Given]],
) -> list[dict[str, Any] | str]:
    if _C.can_record():
        return _C.judge_files(cases, min(_MOST_THREADS, os.cpu_count() or 1))
    return [_judged_by_python(*case) for case in cases]


def _judged_by_python(path: str, steps: bool, evidence: Given) -> dict[str, Any] | str:
    """The same in a build without SQLite."""
    try:
        with opened(Path(path)) as connection:
            connection.row_factory = sqlite3.Row
            rows = [dict(row) for row in connection.execute("SELECT * FROM steps ORDER BY step")]
            cuts: dict[int, list[tuple[int, int, int, int]]] = {}
            for row in connection.execute(
                "SELECT origin, step, bytes, count, birth_steps FROM cuts ORDER BY origin, step"
            ):
                cuts.setdefault(row[0], []).append((row[1], row[2], row[3], row[4]))
    except InputError as error:
        return str(error)
    judged = _C.judge(rows, cuts, steps, evidence)
    return {**judged, "last": rows[-1]["step"] if rows else 0}


def _origins_and_holdings(
    path: Path, wanted: set[int]
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    with opened(path) as connection:
        connection.row_factory = sqlite3.Row
        origins = {
            row["id"]: {**dict(row), "device": _C.device_from_tag(row["device"])}
            for row in connection.execute("SELECT * FROM origins")
            if row["id"] in wanted
        }
        holdings = {
            row["origin"]: _holding(row["path"])
            for row in connection.execute("SELECT origin, path FROM holdings ORDER BY id")
            if row["origin"] in wanted
        }
    return origins, holdings


def _holding(text: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(text)
    if not all(isinstance(hop["text"], str) for hops in told["paths"] for hop in hops):
        raise ValueError("who held its storages cannot be read")
    return told


def _cycles(text: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(text)
    if not isinstance(told, list) or not all({*_CYCLE} <= cycle.keys() for cycle in told):
        raise ValueError("its cycles cannot be read")
    return told


_CYCLE = ("text", "bytes", "count", "collectable")


def _coordinates(text: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(text)
    if not isinstance(told, dict):
        raise TypeError("its coordinates cannot be read")
    return told


def _process(path: Path, meta: Mapping[str, str], last: int) -> dict[str, Any]:
    return {
        "rank": int(meta.get("rank", 0)),
        "host": meta.get("host", ""),
        "pid": int(meta.get("pid", 0)),
        "file": path.name,
        "unit": meta.get("unit", "step"),
        "level": meta.get("level", "trace"),
        "cost": float(meta.get("cost", 0)),
        "left": int(meta["left"]) if meta.get("left") else None,
        "last": last,
        "ended": meta.get("ended", ""),
        "coordinates": _coordinates(meta.get("coordinates", "{}")),
        "gpu": meta.get("gpu", ""),
        "cycles": _cycles(meta.get("cycles", "[]")),
    }


def has_ended(path: Path) -> bool:
    """Whether the process that wrote a recording is done with it."""
    with opened(path) as connection:
        return connection.execute("SELECT 1 FROM meta WHERE key='ended'").fetchone() is not None


def last_step_of(path: Path) -> int | None:
    """The last step of a recording, or None if it has none or cannot be read."""
    with suppress(InputError), opened(path) as connection:
        last: int | None = connection.execute("SELECT max(step) FROM steps").fetchone()[0]
        return last
    return None


def documents(
    paths: Meant, progress: Progress | None = None
) -> tuple[dict[Path, verdicts.Document], dict[Path, str]]:
    """The verdict on each recording that is meant, and why others cannot be read.

    Args:
        paths: Folders and files, or what :func:`find` found.
        progress: Called now and then with how many recordings are judged, of how many.
    """
    found = find(paths)
    out: dict[Path, verdicts.Document] = {}
    broken = dict(found.broken)
    for at in range(0, len(found.files), _AT_ONCE):
        some = found.files[at : at + _AT_ONCE]
        for path, made in zip(some, _documents({p: found.meta[p] for p in some}), strict=True):
            if isinstance(made, InputError):
                broken[path] = str(made)
            else:
                out[path] = made
        if progress is not None:
            progress(at + len(some), len(found.files))
    if not out:
        raise InputError(next(iter(broken.values())))
    return out, broken


def judge(paths: Meant, progress: Progress | None = None) -> verdicts.Document:
    """The verdict on all recordings that are meant, without those that cannot be read."""
    return together(*documents(paths, progress))


def together(
    found: Mapping[Path, verdicts.Document], broken: Mapping[Path, str]
) -> verdicts.Document:
    """The verdict of a job from what :func:`documents` returned."""
    left_out = [{"file": path.name, "why": why} for path, why in broken.items()]
    job = verdicts.merged(list(found.values()))
    job["left_out"] = left_out
    return job


def peak_of(paths: Meant) -> tuple[int, Any]:
    """The highest peak of any process: bytes, and its rank."""
    best: tuple[int, Any] = (0, 0)
    found = find(paths)
    for path in found.files:
        with suppress(InputError), opened(path) as connection:  # the verdict says what is broken
            row = connection.execute(
                "SELECT max(max(peak, coalesce(device_allocated, 0))) FROM steps"
            )
            best = max(best, (int(row.fetchone()[0] or 0), found.meta[path].get("rank", 0)))
    return best
