"""Verdicts as data: the stable JSON, and the first screen that a person reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from tenure.inspect import html
from tenure.inspect.counted import counted_groups, ranks_like
from tenure.inspect.places import numbers, where
from tenure.inspect.words import many

__all__ = [
    "CODES",
    "SCHEMA",
    "Verdict",
    "document",
    "first_screen",
    "grouped",
    "merged",
    "path_from_root",
    "site_text",
    "suspect_lines",
]

SCHEMA = 1
CODES = {"flat": 0, "leak": 1, "growth": 1, "too-short": 3}  # exit statuses
_ORDER = ("leak", "growth", "flat", "too-short")  # the worst first
_SHORT = {"held": "held storages"}
_MOST_GROUPS = 3  # of suspects on the first screen
_MOST_LINES = 8  # where they are of different ranks

Document = dict[str, Any]


class Verdict(Document):
    """A document that notebooks show as a table; in all else it is the dict."""

    def _repr_html_(self) -> str:
        return html.verdict_html(self, first_screen(self))


def document(
    judged: Mapping[str, Any],
    origins: Mapping[int, Mapping[str, Any]],
    holdings: Mapping[int, Mapping[str, Any]],
    process: Mapping[str, Any],
) -> Document:
    """One process's verdict.

    Args:
        judged: What the extension's ``judge`` returned.
        origins: The origins of the suspects, by id.
        holdings: What held their storages when someone last looked, by origin.
        process: ``rank``, ``host``, ``pid``, ``cost`` and the like.
    """
    suspects = []
    for suspect in judged["suspects"]:
        origin = origins.get(suspect["origin"], {})
        held = holdings.get(suspect["origin"], {})
        site, function = _site(origin.get("forward_site") or origin.get("site", ""))
        suspects.append(
            {
                "rank": process.get("rank", 0),
                "device": origin.get("device", "cpu"),
                "bytes": suspect["bytes"],
                "bytes_per_step": round(suspect["per_step"]),
                "confidence": round(suspect["confidence"], 4),
                "count": suspect["count"],
                "since": suspect["since"],
                "storages": held.get("storages", []),
                "op": origin.get("op", ""),
                "module": origin.get("module", ""),
                "phase": origin.get("phase", ""),
                "site": site,
                "function": function,
                "looked": suspect["origin"] in holdings,
                "holders": [path[::-1] for path in held.get("paths", [])],
                "cycle": held.get("cycle", False),
                "frees": held.get("frees", 0),
                "nodes": held.get("nodes", 0),
                "advice": held.get("advice", ""),
            }
        )
    split = {share["name"]: round(share["per_step"]) for share in judged["shares"]}
    rank = {
        **process,
        "verdict": judged["verdict"],
        "steps": judged["steps"],
        "since": judged["since"],
        "bytes_per_step": round(judged["per_step"]),
        "confidence": round(judged["confidence"], 4),
        "seconds_per_step": judged["seconds_per_step"],
        "os": round(judged["total"]["per_step"]),
        "os_grows": judged["total"]["grows"],
        "peak": round(judged["peak"]["per_step"]),
        "split": split,
        "why": judged["why"],
        "filling": _filling(judged, holdings),
    }
    return Verdict(
        schema=SCHEMA,
        verdict=judged["verdict"],
        steps=judged["steps"],
        split=split,
        ranks=[rank],
        suspects=_by_holder(suspects),
        counted=[],
        left_out=[],
    )


def _filling(
    judged: Mapping[str, Any], holdings: Mapping[int, Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The path, as those of suspects, to what has a bound and is not full, if something has."""
    held = [holdings.get(filling["origin"], {}) for filling in judged["filling"]]
    return next((path[::-1] for known in held for path in known.get("paths", [])), [])


def path_from_root(suspect: Mapping[str, Any], number: int = 0) -> list[Mapping[str, Any]]:
    """One of a suspect's paths as a person reads it; JSON has them from the storage outward."""
    return list(reversed(suspect["holders"][number]))


def _by_holder(suspects: list[Document]) -> list[Document]:
    """Those with a known holder and the most growth behind it first."""
    growth: Counter[str] = Counter()
    for suspect in suspects:
        growth[_holder_of(suspect)] += suspect["bytes_per_step"]
    return sorted(
        suspects,
        key=lambda s: (not s["holders"], -growth[_holder_of(s)], -s["bytes_per_step"]),
    )


def _holder_of(suspect: Mapping[str, Any]) -> str:
    """What leaks, whatever lies behind it: the path up to the mark, without its numbers."""
    if not suspect["holders"]:
        return ""
    kept = []
    for hop in path_from_root(suspect):
        kept.append(hop["text"])
        if hop.get("leak"):
            break
    return re.sub(r"\d+", "", " → ".join(kept))


def merged(documents: Sequence[Document]) -> Document:
    """The verdict of a job from those of its processes."""
    ran = _that_train(_one_a_process([d for d in documents if d["steps"] > 0] or list(documents)))
    worst = min(ran, key=lambda d: _ORDER.index(d["verdict"]))
    suspects = [suspect for d in ran for suspect in d["suspects"]]
    ranks = sorted((d["ranks"][0] for d in ran), key=lambda rank: (rank["rank"], rank["pid"]))
    return Verdict(
        schema=SCHEMA,
        verdict=worst["verdict"],
        steps=max(d["steps"] for d in ran),
        split=worst["split"],
        ranks=ranks,
        suspects=_by_holder(suspects),
        counted=counted_groups(ranks),
        left_out=[],
    )


def _one_a_process(documents: list[Document]) -> list[Document]:
    """The worst of each process, which was recorded in parts if it watched itself for a while."""
    out: dict[tuple[str, int], Document] = {}
    for document in sorted(documents, key=lambda d: _ORDER.index(d["verdict"])):
        rank = document["ranks"][0]
        out.setdefault((rank["host"], rank["pid"]), document)
    return list(out.values())


def _that_train(documents: list[Document]) -> list[Document]:
    """Without launchers and helpers: processes that announce no steps beside some that do."""
    train = [d["ranks"][0].get("unit", "step") == "step" for d in documents]
    if not any(train):
        return documents
    pairs = zip(documents, train, strict=True)
    return [d for d, trains in pairs if trains or d["verdict"] in {"leak", "growth"}]


def first_screen(verdict: Document, *, limit_bytes: float | None = None) -> str:
    """What a person sees first: how much, since when, who holds it and where it was made."""
    rank = _spokesman(verdict)
    kind = verdict["verdict"]
    unit = rank.get("unit", "step")
    if kind in {"flat", "too-short"}:
        lines = [
            f"{kind.upper().replace('-', ' ')} over {verdict['steps']:,} {unit}s: {rank['why']}"
        ]
        return "\n".join([*lines, *_left_out_lines(verdict), _ranks_line(verdict)])
    lines = [
        f"{kind.upper()} {_mb(rank['bytes_per_step'])}/{unit} since {unit} {rank['since']:,}"
        + _end(rank, unit, limit_bytes),
        _split_line(rank),
    ]
    if kind == "growth":
        lines.append(rank["why"])
        if rank.get("filling"):
            lines.append(f"  held by {_path_line(rank['filling'][::-1])}")
    counted = verdict.get("counted", [])
    for group in _shown(grouped(verdict["suspects"])):
        lines += suspect_lines(group, verdict["ranks"], counted)
    if kind == "leak" and not verdict["suspects"]:
        lines.append("who holds them was not recorded: run again with --level trace")
    lines += _counted_lines(counted, verdict["ranks"])
    return "\n".join([*lines, *_left_out_lines(verdict), _ranks_line(verdict)])


def _shown(groups: list[list[Document]]) -> list[list[Document]]:
    """Those that grow most, and before them whatever grows on ranks that have no other line."""
    seen: set[int] = set()
    own = []
    for group in groups:
        ranks = {suspect["rank"] for suspect in group}
        own.append(not ranks <= seen)
        seen |= ranks
    chosen = sorted(range(len(groups)), key=lambda at: (not own[at], at))
    most = max(_MOST_GROUPS, min(sum(own), _MOST_LINES))
    return [groups[at] for at in sorted(chosen[:most])]


def _counted_lines(counted: Sequence[Document], ranks: Sequence[Document]) -> list[str]:
    """Of ranks that grow as none does that was traced."""
    alone = [group for group in counted if group["like"] is None]
    alone.sort(key=lambda group: -group["bytes_per_step"])
    lines = []
    for group in alone[:_MOST_LINES]:
        mine = set(group["ranks"])
        some = [rank for rank in ranks if rank["rank"] in mine]
        each = " each" if len(some) > 1 else ""
        growth = f"{_mb(group['bytes_per_step'])}/{ranks[0].get('unit', 'step')}{each}"
        again = f"run again with --ranks {group['ranks'][0]} to see who holds it"
        lines.append(f"{growth} on {where(some, ranks)}, only counted: {again}")
    if len(alone) > _MOST_LINES:
        lines.append(f"… and {many(len(alone) - _MOST_LINES, 'more group')} of ranks")
    return lines


def _left_out_lines(verdict: Document) -> list[str]:
    left_out = verdict.get("left_out", [])
    lines = [f"left out: {one['why']}" for one in left_out[:_MOST_GROUPS]]
    more = len(left_out) - len(lines)
    return [*lines, f"left out: {many(more, 'more recording')}"] if more else lines


def _spokesman(verdict: Document) -> Document:
    found: Document = next(
        rank for rank in verdict["ranks"] if rank["verdict"] == verdict["verdict"]
    )
    return max(
        (r for r in verdict["ranks"] if r["verdict"] == verdict["verdict"]),
        key=lambda r: r["bytes_per_step"],
        default=found,
    )


def _end(rank: Document, unit: str, limit: float | None) -> str:
    rate = max(rank["os"] if rank["os_grows"] else 0, rank["bytes_per_step"])
    left = limit if limit is not None else rank.get("left")
    if not left or rate <= 0 or rank.get("filling"):
        return ""
    steps = left / rate
    seconds = steps * rank["seconds_per_step"]
    if seconds > 30 * 86400:
        return ""
    hours, rest = divmod(int(seconds), 3600)
    at = rank.get("last", 0) + steps
    left_text = f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
    return f" · out of memory near {unit} {_rounded(at):,} (in {left_text})"


def _rounded(value: float) -> int:
    """Three digits: it is an estimate."""
    digits = max(0, len(str(int(value))) - 3)
    return int(round(value, -digits))


def _split_line(rank: Document) -> str:
    most = max([abs(rank["os"]), *map(abs, rank["split"].values())])
    size, name = (1e6, "MB") if most >= 5e4 else (1e3, "kB")
    parts = {part: value for part, value in rank["split"].items() if abs(value) >= 0.05 * size}
    shown = " + ".join(f"{_SHORT.get(p, p)} {value / size:.1f}" for p, value in parts.items())
    unit = rank.get("unit", "step")
    peak = f" · {unit}'s peak {_mb(rank['peak'])}" if rank["peak"] >= 5e4 else ""
    return f"OS {rank['os'] / size:+.1f} {name}" + (f" = {shown}" if shown else "") + peak


def grouped(suspects: Sequence[Document]) -> list[list[Document]]:
    """Those that the same thing holds, on whichever rank, together."""
    seen: dict[str, list[Document]] = {}
    for suspect in suspects:
        seen.setdefault(_holder_of(suspect), []).append(suspect)
    return list(seen.values())


def suspect_lines(
    group: list[Document], ranks: Sequence[Document], counted: Sequence[Document] = ()
) -> list[str]:
    """What the first screen says of storages that the same thing holds."""
    first = group[0]
    mine = [suspect for suspect in group if suspect["rank"] == first["rank"]]
    count = sum(s["count"] for s in mine)
    by = f" by {first['op']}" if first["op"] else ""
    made = by + (f" in {first['module']}" if first["module"] else "")
    places = {(s["op"], s["module"], s["phase"], s["site"], s["device"]) for s in mine}
    more = f" and {many(len(places) - 1, 'more place')}" if len(places) > 1 else ""
    growth = _mb(sum(s["bytes_per_step"] for s in mine))
    line = f"{site_text(first)}{more}"
    held_on = {suspect["rank"] for suspect in group}
    like = ranks_like(held_on, counted) - held_on
    on = where([r for r in ranks if r["rank"] in held_on | like], ranks)
    on = f" on {on}" if len(ranks) > 1 else ""
    unit = ranks[0].get("unit", "step")
    graph = f" with graphs of {many(first['nodes'], 'node')}" if first.get("nodes") else ""
    lines = [f"{many(count, 'storage')}{graph}, {growth}/{unit}, made{made} at {line}{on}"]
    if like:
        others = f"other {len(like):,} were" if len(like) > 1 else "other was"
        traced = numbers(sorted(held_on))
        lines.append(f"  seen on {traced}; the {others} only counted and grew as much")
    if not first.get("looked", True):
        lines.append("  they came too late to look at who holds them: run for some more steps")
    elif not first["holders"]:
        lines.append("  held by nothing that Python or autograd knows: C++ code holds them")
    else:
        what = "  held in a cycle: " if first["cycle"] else "  held by "
        lines.append(what + _path_line(path_from_root(first)))
    advice = [first["advice"]] if first["advice"] else []
    if first.get("frees"):
        advice.append(f"when looked at, {_mb(first['frees'])[1:]} would have gone with it")
    if advice:
        lines.append(f"  {' · '.join(advice)}")
    return lines


def _path_line(path: Sequence[Mapping[str, Any]]) -> str:
    shown = [hop["text"] for hop in path]
    marked = [i for i, hop in enumerate(path) if hop.get("leak")]
    if marked and len(marked) < len(path):
        shown[marked[0]] += "  ← grows here"
    return " → ".join(shown)


def _site(text: str) -> tuple[str, str]:
    """The ``file:line`` and the function of a site as recordings have it."""
    found = re.fullmatch(r"(.*:\d+) (\S+)", text)
    return (found[1], found[2]) if found else (text, "")


def site_text(suspect: Mapping[str, Any]) -> str:
    """``train.py:41 main``, without the folder."""
    site = suspect["site"].rpartition("/")[2]
    return f"{site} {suspect.get('function', '')}".strip() or "an unknown line"


def _ranks_line(verdict: Document) -> str:
    ranks = verdict["ranks"]
    cost = max(rank.get("cost", 0.0) for rank in ranks)
    told = f"watching cost {100 * cost:.1f} %"
    if len(ranks) == 1:
        return told
    said = {r["rank"] for r in ranks if r["verdict"] == verdict["verdict"]}
    like = ranks_like(said, verdict.get("counted", []))
    alike = [r["verdict"] == verdict["verdict"] or r["rank"] in like for r in ranks]
    others = {r["verdict"] for r, is_alike in zip(ranks, alike, strict=True) if not is_alike}
    rest = f"; others {', '.join(sorted(others))}" if others else ""
    on = where(list(compress(ranks, alike)), ranks, f" of {len(ranks):,}")
    counted = sum(r.get("level") == "count" for r in ranks)
    if 0 < counted < len(ranks):
        told = f"{many(counted, 'rank')} only counted · {told}"
    return f"on {on}{rest} · {told}"


def _mb(value: float) -> str:
    return f"{value / 1e6:+.1f} MB" if abs(value) >= 5e4 else f"{value / 1e3:+.1f} kB"


def shown_path(path: str | Path) -> str:
    """A path as a person would type it: from here, if it is below."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (OSError, ValueError, RuntimeError):  # the last where links lead in a circle
        return str(path)
