"""`tenure why` and `tenure check`: what recordings say."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tenure.errors import InputError
from tenure.inspect import recordings, verdicts
from tenure.inspect.verdicts import CODES

__all__ = ["CODES", "why_all", "why_one"]

_LARGEST = (1 << 63) - 1  # number that SQLite has


def why_all(verdict: verdicts.Document, most: int = 5) -> str:
    """Every suspect of a verdict with all the ways in which it is held."""
    out = [verdicts.first_screen(verdict)]
    for number, suspect in enumerate(verdict["suspects"][:most], 1):
        out += ["", *_suspect(number, suspect)]
    for rank in verdict["ranks"]:
        out += _cycles(rank)
    left = len(verdict["suspects"]) - most
    if left > 0:
        out.append(f"\n… and {left} more; --json has them all")
    return "\n".join(out)


def _suspect(number: int, suspect: dict[str, Any]) -> list[str]:
    made = suspect["op"] or "an unknown operator"
    inside = f" in {suspect['module']}" if suspect["module"] else ""
    size = f"{suspect['count']:,} storages, {suspect['bytes'] / 1e6:,.1f} MB"
    growth = f"{suspect['bytes_per_step'] / 1e6:+.3f} MB a step"
    sure = f"sure to {100 * suspect['confidence']:.1f} %"
    where = f"{suspect['site']} {suspect['function']}".strip() or "an unknown line"
    lines = [
        f"{number}. rank {suspect['rank']} {suspect['device']}: {size}, {growth}, {sure}",
        f"   made by {made}{inside} ({suspect['phase']}) at {where}",
    ]
    for way in range(len(suspect["holders"])):
        word = "held in a cycle" if suspect["cycle"] else "held by"
        lines.append(f"   {word}:")
        lines += [
            f"     {'└ ' if i else ''}{hop['text']}{'   ← grows here' if hop.get('leak') else ''}"
            for i, hop in enumerate(verdicts.path_from_root(suspect, way))
        ]
    if suspect["advice"]:
        lines.append(f"   {suspect['advice']}")
    if suspect.get("frees"):
        lines.append(f"   {suspect['frees'] / 1e6:,.1f} MB would go with what grows")
    if suspect["storages"]:
        lines.append(f"   storages {', '.join(map(str, suspect['storages'][-5:]))}")
    return lines


def _cycles(rank: dict[str, Any]) -> list[str]:
    cycles = rank.get("cycles", [])
    if not cycles:
        return []
    lines = ["", f"Cycles that nothing holds, on rank {rank['rank']}:"]
    for cycle in cycles:
        size = f"{cycle['bytes'] / 1e6:,.1f} MB in {cycle['count']:,}"
        free = "Python's collector frees them" if cycle["collectable"] else "nothing frees them"
        lines.append(f"   {size}, {free}: {cycle['text']}")
    return lines


def why_one(paths: recordings.Meant, storage: int) -> str:
    """One storage, by the id that recordings and verdicts give it."""
    fits = -_LARGEST <= storage <= _LARGEST
    for path in recordings.files_in(paths) if fits else ():
        with recordings.opened(path) as connection:
            connection.row_factory = sqlite3.Row
            row = connection.execute(
                "SELECT s.*, o.op, o.module, o.phase, o.site, o.forward_site, "
                "(SELECT max(step) FROM steps) AS last_step FROM storages s "
                "LEFT JOIN origins o ON o.id = s.origin WHERE s.id = ?",
                (storage,),
            ).fetchone()
            if row is None:
                continue
            held = connection.execute(
                "SELECT step, path FROM holdings WHERE origin = ? ORDER BY id DESC LIMIT 1",
                (row["origin"],),
            ).fetchone()
            return "\n".join(_storage(path, row, held))
    raise InputError(
        f"no recording has a storage {storage}: `tenure why` without a number lists suspects"
    )


def _storage(path: Path, row: sqlite3.Row, held: sqlite3.Row | None) -> list[str]:
    last = row["last_step"] or 0
    alive = row["died_step"] is None or row["born_step"] <= last < row["died_step"]
    end = "alive at the end" if alive else f"died in step {row['died_step']}"
    life = f"born in step {row['born_step']}, {end}"
    inside = f" in {row['module']}" if row["module"] else ""
    where = row["site"] or "an unknown line"
    lines = [
        f"storage {row['id']} in {path.name}: {row['bytes']:,} bytes, {life}",
        f"made by {row['op'] or 'unknown'}{inside} ({row['phase']}) at {where}",
    ]
    if row["forward_site"]:
        lines.append(f"for what forward did at {row['forward_site']}")
    if alive and held is not None:
        paths = json.loads(held["path"])["paths"]
        lines.append(f"its like were held, in step {held['step']}, by:")
        lines += ["  " + " → ".join(hop["text"] for hop in hops) for hops in paths]
    return lines
