"""`tenure diff` and `tenure check --baseline`: what grew between two runs."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tenure.errors import InputError
from tenure.inspect import recordings, verdicts
from tenure.inspect.words import size
from tenure.report.lives import Life, opened
from tenure.report.peak import Peak, module_of, peak_of

__all__ = ["Run", "compared", "over_baseline", "run_of", "text_of"]

_BY = ("kind", "module", "site")
_MOST = 8  # lines of each table


@dataclass(frozen=True)
class Run:
    """What one run came to.

    Attributes:
        name: Its folder.
        verdict: As in the verdict's JSON.
        unit: What its steps are.
        grows: Bytes a step, of the rank that grows the most.
        peak: Most bytes that a process held.
        rank: Whose peak that was.
        parts: Bytes at the highest peak that was traced, by kind, module and site; empty if all
            were only counted.
        traced: Whose peak that was; None if all were only counted.
    """

    name: str
    verdict: str
    unit: str
    grows: int
    peak: int
    rank: int
    parts: dict[str, Counter[str]]
    traced: int | None


def run_of(paths: recordings.Meant, name: str, job: verdicts.Document | None = None) -> Run:
    """Reads a run; raises InputError for what is none.

    Args:
        paths: Folders and files, or what :func:`tenure.inspect.recordings.find` found.
        name: What it is called.
        job: The verdict on them, if it is known.
    """
    found = recordings.find(paths)
    job = job or recordings.judge(found)
    peaks = []
    for path in found.files:
        with suppress(InputError), recordings.opened(path) as connection:  # the verdict names it
            # With max() SQLite gives the other columns of the row that has it.
            sql = "SELECT max(max(peak, coalesce(device_allocated, 0))), step, peak FROM steps"
            height, step, counted = connection.execute(sql).fetchone()
            if height is not None:
                meta = found.meta[path]
                traced = meta.get("level") != "count"
                peaks.append((height, traced, path, int(meta.get("rank", 0)), step, counted))
    peaks.sort(key=lambda one: one[:2], reverse=True)
    parts: dict[str, Counter[str]] = {}
    traced_rank = None
    with_lives = next((one for one in peaks if one[1]), None)
    if with_lives is not None:
        _, _, path, traced_rank, step, counted = with_lives
        with opened(path) as recorded:
            before = recorded.step_before(step)
            parts = _parts(peak_of(recorded.lives(), step, before, counted))
    return Run(
        name,
        job["verdict"],
        job["ranks"][0].get("unit", "step"),
        max(rank["bytes_per_step"] for rank in job["ranks"]),
        peaks[0][0] if peaks else 0,
        peaks[0][3] if peaks else 0,
        parts,
        traced_rank,
    )


def _parts(peak: Peak) -> dict[str, Counter[str]]:
    out: dict[str, Counter[str]] = {by: Counter() for by in _BY}
    for life in peak.lives:
        for by in _BY:
            out[by][_name(life, by)] += life.nbytes
    if peak.unknown:
        for by in _BY:
            out[by]["other" if by == "kind" else "not recorded"] += peak.unknown
    return out


def _name(life: Life, by: str) -> str:
    if by == "kind":
        return life.kind
    if by == "module":
        return module_of(life) or "no module"
    # Two runs may have the program in different folders.
    site = life.origin["forward_site"] or life.origin["site"]
    return site.rpartition("/")[2] or "an unknown line"


def compared(before: Run, after: Run) -> dict[str, Any]:
    """The difference as data: what is positive grew."""
    return {
        "schema": verdicts.SCHEMA,
        "before": _about(before),
        "after": _about(after),
        "peak": after.peak - before.peak,
        "bytes_per_step": after.grows - before.grows,
        **{by: _grown(before, after, by) for by in _BY},
    }


def _about(run: Run) -> dict[str, Any]:
    told = {"name": run.name, "verdict": run.verdict, "peak": run.peak, "rank": run.rank}
    return {**told, "traced": run.traced, "bytes_per_step": run.grows}


def _grown(before: Run, after: Run, by: str) -> list[dict[str, Any]]:
    if not before.parts or not after.parts:
        return []
    names = before.parts[by].keys() | after.parts[by].keys()
    rows: list[dict[str, Any]] = [
        {"name": name, "before": before.parts[by][name], "after": after.parts[by][name]}
        for name in names
    ]
    rows.sort(key=lambda row: (-abs(row["after"] - row["before"]), row["name"]))
    return [row for row in rows if row["before"] != row["after"]]


def text_of(before: Run, after: Run) -> str:
    """The difference as a person reads it: the whole first, then what made it."""
    change = compared(before, after)
    part = f", {100 * change['peak'] / before.peak:+.1f} %" if before.peak else ""
    slopes = f"{_signed(before.grows)}/{before.unit} → {_signed(after.grows)}/{after.unit}"
    out = [
        f"peak   {size(before.peak)} → {size(after.peak)} ({_signed(change['peak'])}{part})",
        f"slope  {slopes} ({before.verdict} → {after.verdict})",
    ]
    out += _ranks_lines(before, after)
    for by in _BY:
        rows = change[by]
        if rows:
            out += ["", f"{'by ' + by:<44}{'before':>12}{'after':>12}{'change':>13}"]
        for row in rows[:_MOST]:
            sizes = f"{size(row['before']):>12}{size(row['after']):>12}"
            out.append(f"  {row['name']:<42}{sizes}{_signed(row['after'] - row['before']):>13}")
        if len(rows) > _MOST:
            out.append(f"  … and {len(rows) - _MOST} more; --json has them all")
    if not before.parts or not after.parts:
        counted = after.name if before.parts else before.name
        out.append(f"{counted} was only counted: record with --level trace to see what grew")
    elif not any(change[by] for by in _BY):
        out.append("nothing grew: their peaks were made of the same")
    return "\n".join(out)


def _ranks_lines(before: Run, after: Run) -> list[str]:
    """Whose the figures are, unless all are of one rank."""
    if len({before.rank, after.rank, before.traced, after.traced} - {None}) == 1:
        return []
    lines = [f"peaks  of rank {before.rank} → rank {after.rank}"]
    if before.parts and after.parts:
        of = f"of rank {before.traced} → rank {after.traced}"
        lines.append(f"tables {of}, which have the highest peaks that were traced")
    return lines


def over_baseline(before: Run, after: Run, tolerance: float) -> str:
    """Why a run is worse than the one that it is held against, or nothing."""
    said = []
    if after.peak > before.peak * (1 + tolerance / 100):
        most = next(
            (row for row in compared(before, after)["kind"] if row["after"] > row["before"]), None
        )
        made = f", most of it {most['name']}" if most else ""
        grown = (
            f"{size(before.peak)} → {size(after.peak)}, "
            f"{100 * (after.peak / before.peak - 1):+.1f} %"
            if before.peak
            else size(after.peak)
        )
        said.append(f"peak over that of {before.name}: {grown}{made}")
    if after.verdict in {"leak", "growth"} and before.verdict == "flat":
        said.append(
            f"{after.verdict} where {before.name} was flat: {_signed(after.grows)}/{after.unit}"
        )
    return "\n".join(said)


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{size(abs(value))}"
