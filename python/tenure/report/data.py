"""What a report shows, as plain data: its page has one block of it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tenure.inspect import recordings, verdicts
from tenure.report.lives import KINDS, Life, Recorded, opened
from tenure.report.peak import peak_of, tree_of

__all__ = ["as_block", "collected"]

_MOST_POINTS = 400  # of a curve
_MOST_CURVES = 12  # one for each rank; beyond it a band, and curves of those that stand out
_MOST_TRACED = 8  # ranks whose storages are shown
_MOST_STORAGES = 100_000
_SERIES = ("held", "peak", "os")
_TOLD = ("tenure", "torch", "python", "machine", "began", "run")


@dataclass
class _Rank:
    """What the page needs of one recording."""

    path: Path
    verdict: verdicts.Document
    about: dict[str, Any]
    steps: list[int]
    curves: dict[str, list[int]]
    meta: dict[str, str]


def collected(
    paths: recordings.Meant, progress: recordings.Progress | None = None, name: str = ""
) -> dict[str, Any]:
    """All that a report of these recordings shows; raises InputError if none can be read.

    Args:
        paths: Folders and files, or what :func:`tenure.inspect.recordings.find` found.
        progress: Called now and then with how many recordings are judged, of how many.
        name: What the page is called.
    """
    found = recordings.find(paths)
    judged, broken = recordings.documents(found, progress)
    job = recordings.together(judged, broken)
    shown = {id(told) for told in job["ranks"]}
    ranks = [
        _read(path, verdict, found.meta[path])
        for path, verdict in judged.items()
        if id(verdict["ranks"][0]) in shown
    ]
    ranks.sort(key=lambda rank: (rank.about["rank"], rank.path.name))
    traced = _traced(ranks)
    return {
        "name": name or verdicts.shown_path(found.files[0].parent),
        "verdict": job["verdict"],
        "screen": verdicts.first_screen(job).splitlines(),
        "unit": job["ranks"][0].get("unit", "step"),
        "kinds": KINDS,
        "ranks": [rank.about for rank in ranks],
        "memory": _memory(ranks),
        "suspects": _suspects(job),
        "cycles": [
            {"rank": rank["rank"], **cycle} for rank in job["ranks"] for cycle in rank["cycles"]
        ],
        "peaks": [told for told, _ in traced],
        "storages": _table([(told["rank"], lives) for told, lives in traced]),
        "environment": _environment(ranks),
    }


def _read(path: Path, verdict: verdicts.Document, meta: dict[str, str]) -> _Rank:
    with recordings.opened(path) as connection:
        rows = _rows(connection)
    top = max(rows, key=lambda row: row["peak"], default={"peak": 0, "step": 0})
    told = verdict["ranks"][0]
    about = {
        "rank": told["rank"],
        "host": told["host"],
        "pid": told["pid"],
        "verdict": told["verdict"],
        "why": told["why"],
        "steps": told["steps"],
        "grows": told["bytes_per_step"],
        "coordinates": told["coordinates"],
        "gpu": told.get("gpu", ""),
        "level": meta.get("level", ""),
        "peak": top["peak"],
        "peak_step": top["step"],
    }
    curves = {
        "held": [row["held"] for row in rows],
        "peak": [row["peak"] for row in rows],
        "os": [row["device_used"] or row["rss"] or 0 for row in rows],
    }
    return _Rank(path, verdict, about, [row["step"] for row in rows], curves, meta)


def _rows(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """So many that a curve has room for them: of each stretch the row with the highest peak."""
    connection.row_factory = sqlite3.Row
    first, last = connection.execute("SELECT min(step), max(step) FROM steps").fetchone()
    width = 1 + ((last or 0) - (first or 0)) // _MOST_POINTS
    # With max() SQLite gives the other columns of the row that has it.
    sql = "SELECT step, held, max(peak) AS peak, rss, device_used FROM steps GROUP BY step / ?"
    return [dict(row) for row in connection.execute(sql, [width])]


def _memory(ranks: Sequence[_Rank]) -> dict[str, Any]:
    """Curves of all ranks, or a band and the curves of those that stand out."""
    if len(ranks) <= _MOST_CURVES:
        return {"curves": [_curve(rank) for rank in ranks], "bands": None}
    last = max((rank.steps[-1] for rank in ranks if rank.steps), default=0)
    grid = np.unique(np.linspace(0, last, _MOST_POINTS // 2, dtype=np.int64))
    bands: dict[str, Any] = {"steps": grid.tolist()}
    far = np.zeros(len(ranks))
    for name in _SERIES:
        values = np.full((len(ranks), len(grid)), np.nan)
        for row, rank in zip(values, ranks, strict=True):
            if rank.steps:
                row[:] = np.interp(grid, rank.steps, rank.curves[name])
                row[grid > rank.steps[-1] + last / _MOST_POINTS] = np.nan  # it had ended
        low, middle, high = np.nanpercentile(values, [5, 50, 95], axis=0)
        bands[name] = {
            "low": low.round().tolist(),
            "middle": middle.round().tolist(),
            "high": high.round().tolist(),
        }
        if name == "held":
            far = np.nanmax(np.abs(values - middle), axis=1)
    order = sorted(
        range(len(ranks)),
        key=lambda at: (ranks[at].about["verdict"] not in {"leak", "growth"}, -far[at]),
    )
    shown = _of_each_kind([ranks[at] for at in order])
    return {"curves": [_curve(rank) for rank in shown], "bands": bands}


def _of_each_kind(ranks: Sequence[_Rank]) -> list[_Rank]:
    """The first few, and of those with the same place in the job and the same verdict only some."""
    out: list[_Rank] = []
    seen: dict[str, int] = {}
    for rank in ranks:
        place = rank.about["coordinates"].get("stage", rank.about["coordinates"].get("pp"))
        group = f"{rank.about['verdict']} {place}"
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= 2 and len(out) < _MOST_CURVES:
            out.append(rank)
    return out


def _curve(rank: _Rank) -> dict[str, Any]:
    return {"rank": rank.about["rank"], "steps": rank.steps, **rank.curves}


def _suspects(job: verdicts.Document) -> list[dict[str, Any]]:
    """Those that the same thing holds are one, as on the first screen."""
    out = []
    for group in verdicts.grouped(job["suspects"]):
        first = group[0]
        paths = [verdicts.path_from_root(first, way) for way in range(len(first["holders"]))]
        out.append(
            {
                "lines": verdicts.suspect_lines(group, job["ranks"], job["counted"]),
                "ranks": sorted({suspect["rank"] for suspect in group}),
                "cycle": first["cycle"],
                "advice": first["advice"],
                "paths": paths,
                "places": [
                    {
                        "rank": s["rank"],
                        "device": s["device"],
                        "op": s["op"],
                        "module": s["module"],
                        "phase": s["phase"],
                        "site": f"{s['site']} {s['function']}".strip(),
                        "bytes": s["bytes"],
                        "grows": s["bytes_per_step"],
                        "count": s["count"],
                    }
                    for s in group[:32]
                ],
            }
        )
    return out[:32]


def _traced(ranks: Sequence[_Rank]) -> list[tuple[dict[str, Any], list[Life]]]:
    """Of some ranks, those with suspects first: their peaks, and their storages."""
    order = sorted(
        (rank for rank in ranks if rank.about["level"] != "count"),
        key=lambda rank: (not rank.verdict["suspects"], -rank.about["peak"]),
    )
    out: list[tuple[dict[str, Any], list[Life]]] = []
    for rank in order[:_MOST_TRACED]:
        if sum(len(lives) for _, lives in out) > _MOST_STORAGES:
            break  # there is no room for more
        with opened(rank.path) as recorded:
            lives = _lives(recorded)
            before = recorded.step_before(rank.about["peak_step"])
        if lives:
            peak = peak_of(lives, rank.about["peak_step"], before, rank.about["peak"])
            told = {"rank": rank.about["rank"], "step": peak.step, "bytes": peak.nbytes}
            out.append(({**told, "tree": tree_of(peak)}, lives))
    return sorted(out, key=lambda one: int(one[0]["rank"]))


def _lives(recorded: Recorded) -> list[Life]:
    return [life for life in recorded.lives() if life.nbytes > 0]


def _table(given: Sequence[tuple[int, list[Life]]]) -> dict[str, Any]:
    """Storages in columns, the alive and the large first; texts that many share stand once."""
    rows = [(rank, life) for rank, lives in given for life in lives]
    total = len(rows)
    if total > _MOST_STORAGES:
        rows.sort(key=lambda row: (row[1].died is not None, -row[1].nbytes))
        rows = rows[:_MOST_STORAGES]
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    columns: dict[str, list[Any]] = {
        "rank": [rank for rank, _ in rows],
        "id": [life.number for _, life in rows],
        "bytes": [life.nbytes for _, life in rows],
        "born": [life.born_step for _, life in rows],
        "died": [-1 if life.died_step is None else life.died_step for _, life in rows],
        "kind": [number(life.kind) for _, life in rows],
        "op": [number(life.origin["op"]) for _, life in rows],
        "module": [number(life.name or life.origin["module"]) for _, life in rows],
        "site": [number(life.origin["forward_site"] or life.origin["site"]) for _, life in rows],
        "device": [number(life.device) for _, life in rows],
    }
    return {"total": total, "columns": columns, "texts": list(texts)}


def _environment(ranks: Sequence[_Rank]) -> list[tuple[str, str]]:
    """What all recordings agree on, and the others' values side by side."""
    out = [("recordings", str(len(ranks))), ("hosts", _several(r.about["host"] for r in ranks))]
    variables = sorted({key for rank in ranks for key in rank.meta if key.startswith("env ")})
    for key in (*_TOLD, *variables):
        values = _several(rank.meta.get(key, "") for rank in ranks)
        out += [(key.removeprefix("env "), values)]
    cost = max((rank.verdict["ranks"][0]["cost"] for rank in ranks), default=0.0)
    out.append(("watching cost", f"{100 * cost:.1f} %"))
    return [(key, value) for key, value in out if value]


def _several(values: Iterable[str]) -> str:
    found = sorted(set(values) - {""})
    more = f" … ({len(found)} in all)" if len(found) > 4 else ""
    return ", ".join(found[:4]) + more


def as_block(data: dict[str, Any]) -> str:
    """As JSON that may stand in a page: no text in it can end the block."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
