"""Ranks that were only counted: which of them grow, and which traced rank grows as they do.

What is counted has no suspects. But ranks of one stage run one program: where one of them was
traced and leaks, the others that grow by as much leak the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["counted_groups", "ranks_like"]

_ALIKE = 1.5  # times as fast, at most


def counted_groups(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The counted ranks that grow, those of one stage and pace together, the most ranks first.

    Returns:
        Each with ``ranks``, ``bytes_per_step`` (the median) and ``like``: a rank that was traced,
        leaks and grows as they do, or None.
    """
    growing = [r for r in ranks if r.get("level") == "count" and r["verdict"] == "growth"]
    leaking = [r for r in ranks if r["verdict"] == "leak"]
    groups: list[list[dict[str, Any]]] = []
    for rank in sorted(growing, key=lambda rank: (str(_stage(rank)), _pace(rank))):
        if groups and _are_alike(groups[-1][0], rank):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    out = []
    for group in groups:
        middle = sorted(group, key=_pace)[len(group) // 2]
        like = next((rank["rank"] for rank in leaking if _are_alike(middle, rank)), None)
        pace = statistics.median(map(_pace, group))
        numbers = sorted(rank["rank"] for rank in group)
        out.append({"ranks": numbers, "bytes_per_step": round(pace), "like": like})
    return sorted(out, key=lambda group: (-len(group["ranks"]), group["ranks"]))


def ranks_like(numbers: set[int], groups: Sequence[dict[str, Any]]) -> set[int]:
    """The counted ranks that grow as one of these does."""
    return {rank for group in groups if group["like"] in numbers for rank in group["ranks"]}


def _stage(rank: dict[str, Any]) -> int | None:
    stage: int | None = rank.get("coordinates", {}).get("stage")
    return stage


def _pace(rank: dict[str, Any]) -> float:
    """What storages grow by, whether each is known or not; where they do not, all that grows."""
    held: float = rank["split"].get("held", 0)
    grows: float = rank["bytes_per_step"]
    return held if 2 * held >= grows else grows


def _are_alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    less, more = sorted((_pace(a), _pace(b)))
    return _stage(a) == _stage(b) and more <= _ALIKE * less
