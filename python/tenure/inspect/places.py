"""Where ranks are, in words: their numbers, hosts, GPUs and coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["numbers", "where"]

_MOST_SPANS = 8  # of ranks that are not in a row
_MOST_HOSTS = 2  # by name

Rank = dict[str, Any]


def where(some: Sequence[Rank], ranks: Sequence[Rank], total: str = "") -> str:
    """``ranks 0-3, all stage 0``: which ones, and what sets them apart from the others."""
    mine = {rank["rank"] for rank in some}
    out = f"{numbers(sorted(mine))}{total}"
    common = _common(some)
    rest = [rank for rank in ranks if rank["rank"] not in mine]
    telling = [
        f"{name} {value}"
        for name, value in common.items()
        if any(_place_of(rank).get(name) != value for rank in rest)
    ]
    if telling:
        out += f", {'all ' if len(mine) > 1 else ''}{', '.join(telling)}"
    return out if "host" in common else out + _hosts(some, rest)


def _hosts(some: Sequence[Rank], rest: Sequence[Rank]) -> str:
    """``, on 4 hosts, node01 … node04``, unless the others are on the same."""
    names = sorted({rank.get("host", "") for rank in some})
    if not {rank.get("host", "") for rank in rest} - set(names):
        return ""
    if len(names) <= _MOST_HOSTS:
        return f", on hosts {' and '.join(names)}"
    return f", on {len(names):,} hosts, {names[0]} … {names[-1]}"


def _place_of(rank: Rank) -> dict[str, Any]:
    gpu = {"GPU": rank["gpu"]} if rank.get("gpu") else {}
    return {**rank.get("coordinates", {}), "host": rank.get("host", ""), **gpu}


def _common(ranks: Sequence[Rank]) -> dict[str, Any]:
    places = [_place_of(rank) for rank in ranks]
    return {
        name: value
        for name, value in (places[0] if places else {}).items()
        if all(place.get(name) == value for place in places)
    }


def numbers(ranks: Sequence[int]) -> str:
    """``rank 7``, ``ranks 0-3, 7``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_spans(ranks)}"


def _spans(numbers: Sequence[int]) -> str:
    """``0-3, 7``."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in out]
    if len(shown) > _MOST_SPANS:
        return f"{', '.join(shown[: _MOST_SPANS - 1])} … {shown[-1]} ({len(numbers):,} ranks)"
    return ", ".join(shown)
