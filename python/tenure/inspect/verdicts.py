"""Verdicts as data: the stable JSON, and the first screen that a person reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tenure.inspect import html

__all__ = [
    "CODES",
    "SCHEMA",
    "Verdict",
    "document",
    "first_screen",
    "merged",
    "path_from_root",
    "site_text",
]

SCHEMA = 1
CODES = {"flat": 0, "leak": 1, "growth": 1, "too-short": 3}  # exit statuses
_ORDER = ("leak", "growth", "flat", "too-short")  # the worst first
_SHORT = {"held": "held storages"}

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
    return Verdict(
        schema=SCHEMA,
        verdict=worst["verdict"],
        steps=max(d["steps"] for d in ran),
        split=worst["split"],
        ranks=sorted((d["ranks"][0] for d in ran), key=lambda rank: (rank["rank"], rank["pid"])),
        suspects=_by_holder(suspects),
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
    train = [d for d in documents if d["ranks"][0].get("unit", "step") == "step"]
    if not train:
        return documents
    return [d for d in documents if d in train or d["verdict"] in {"leak", "growth"}]


def first_screen(verdict: Document, *, limit_bytes: float | None = None) -> str:
    """What a person sees first: how much, since when, who holds it and where it was made."""
    rank = _spokesman(verdict)
    kind = verdict["verdict"]
    unit = rank.get("unit", "step")
    if kind in {"flat", "too-short"}:
        lines = [
            f"{kind.upper().replace('-', ' ')} over {verdict['steps']:,} {unit}s: {rank['why']}"
        ]
        return "\n".join([*lines, _ranks_line(verdict)])
    lines = [
        f"{kind.upper()} {_mb(rank['bytes_per_step'])}/{unit} since {unit} {rank['since']:,}"
        + _end(rank, unit, limit_bytes),
        _split_line(rank),
    ]
    if kind == "growth":
        lines.append(rank["why"])
        if rank.get("filling"):
            lines.append(f"  held by {_path_line(rank['filling'][::-1])}")
    for group in _groups(verdict["suspects"])[:3]:
        lines += _suspect_lines(group, verdict["ranks"])
    if kind == "leak" and not verdict["suspects"]:
        lines.append("who holds them was not recorded: run again with --level trace")
    return "\n".join([*lines, _ranks_line(verdict)])


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


def _groups(suspects: Sequence[Document]) -> list[list[Document]]:
    """Those that the same thing holds, on whichever rank, are one line."""
    seen: dict[str, list[Document]] = {}
    for suspect in suspects:
        seen.setdefault(_holder_of(suspect), []).append(suspect)
    return list(seen.values())


def _suspect_lines(group: list[Document], ranks: Sequence[Document]) -> list[str]:
    first = group[0]
    mine = [suspect for suspect in group if suspect["rank"] == first["rank"]]
    count = sum(s["count"] for s in mine)
    by = f" by {first['op']}" if first["op"] else ""
    made = by + (f" in {first['module']}" if first["module"] else "")
    more = f" and {_many(len(mine) - 1, 'more place')}" if len(mine) > 1 else ""
    growth = _mb(sum(s["bytes_per_step"] for s in mine))
    where = f"{site_text(first)}{more}"
    held_on = {suspect["rank"] for suspect in group}
    on = (
        f" on {_where([r for r in ranks if r['rank'] in held_on], ranks)}" if len(ranks) > 1 else ""
    )
    unit = ranks[0].get("unit", "step")
    lines = [f"{_many(count, 'storage')}, {growth}/{unit}, made{made} at {where}{on}"]
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
    same = [r for r in ranks if r["verdict"] == verdict["verdict"]]
    others = {r["verdict"] for r in ranks} - {verdict["verdict"]}
    rest = f"; others {', '.join(sorted(others))}" if others else ""
    return f"on {_where(same, ranks, f' of {len(ranks)}')}{rest} · {told}"


def _where(some: Sequence[Document], ranks: Sequence[Document], total: str = "") -> str:
    """``ranks 0-3, all stage 0``: which ones, and what sets them apart from the others."""
    numbers = sorted({rank["rank"] for rank in some})
    names = "rank" if len(numbers) == 1 else "ranks"
    out = f"{names} {_spans(numbers)}{total}"
    common = _common(some)
    rest = [rank for rank in ranks if rank["rank"] not in numbers]
    telling = [
        f"{name} {value}"
        for name, value in common.items()
        if any(_place_of(rank).get(name) != value for rank in rest)
    ]
    return out + (f", {'all ' if len(numbers) > 1 else ''}{', '.join(telling)}" if telling else "")


def _place_of(rank: Document) -> dict[str, Any]:
    return {**rank.get("coordinates", {}), "host": rank.get("host", "")}


def _common(ranks: Sequence[Document]) -> dict[str, Any]:
    places = [_place_of(rank) for rank in ranks]
    return {
        name: value
        for name, value in (places[0] if places else {}).items()
        if all(place.get(name) == value for place in places)
    }


def _spans(numbers: Sequence[int]) -> str:
    """``0-3, 7``."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _mb(value: float) -> str:
    return f"{value / 1e6:+.1f} MB" if abs(value) >= 5e4 else f"{value / 1e3:+.1f} kB"


def shown_path(path: str | Path) -> str:
    """A path as a person would type it: from here, if it is below."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)
