"""References of a retention path in words, chains made short, and the lines that keep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tenure.inspect import source

__all__ = [
    "Hop",
    "add_lines",
    "add_lines_of_cycle",
    "collapsed",
    "first_alike",
    "lines_that_keep",
    "path_text",
]

_LONGEST_PERIOD = 3  # of hops that repeat
_NAMED = 3  # hops that are asked for the line that keeps
_EVERYWHERE = {"", "numpy", "torch"}  # packages that nearly every line uses


@dataclass
class Hop:
    """One reference on the way from a root to a storage.

    Attributes:
        kind: What it is: ``local``, ``global``, ``attribute``, ``item``, ``graph``, ``saved`` …
        text: The same in words.
        name: The variable or attribute that refers, if it has a name.
        file: The source file in which that name is used.
        leak: Whether this is the reference that grows.
        elements: Which elements of the path it stands for.
        target: The element that it refers to, which may be beyond the path's end.
    """

    kind: str
    text: str
    name: str = ""
    file: str = ""
    leak: bool = False
    elements: list[int] = field(default_factory=list)
    target: int = 0

    def as_json(self) -> dict[str, Any]:
        """As it is written to recordings and verdicts."""
        out: dict[str, Any] = {"kind": self.kind, "text": self.text}
        if self.leak:
            out["leak"] = True
        return out


def path_text(hops: Iterable[Hop]) -> str:
    """One line: ``losses (local of main) → [37] → graph (9 nodes) → MmBackward0 saved self``."""
    return " → ".join(hop.text + ("  ← grows here" if hop.leak else "") for hop in hops)


def collapsed(hops: Sequence[Hop]) -> list[Hop]:
    """Chains made short: ``.next of Node (×368)`` for as many hops that say the same."""
    out: list[Hop] = []
    at = 0
    while at < len(hops):
        periods = range(1, _LONGEST_PERIOD + 1)
        period, times = max(((p, _times(hops, at, p)) for p in periods), key=_length)
        period = period if times > 1 else 1
        run = hops[at : at + period * times]
        kept = [replace(hop) for hop in run[:period]]
        if times > 1:
            kept[-1].text += f" (×{times})"
            for hop in kept:
                hop.leak = False
            kept[0].leak = any(hop.leak for hop in run)
        out += kept
        at += len(run)
    return out


def _length(run: tuple[int, int]) -> int:
    period, times = run
    return period * times if times > 1 else 1


def first_alike(hops: Sequence[Hop], at: int) -> int:
    """The first hop of a chain that says what the hop at a place says."""
    said = _said(hops)
    periods = range(1, _LONGEST_PERIOD + 1)
    period = next((p for p in periods if said[at] in said[at + p : at + p + 1]), 1)
    while at >= period and said[at - period] == said[at]:
        at -= period
    return at


def _said(hops: Iterable[Hop]) -> list[str]:
    return [re.sub(r"\d+", "", hop.text) for hop in hops]


def _times(hops: Sequence[Hop], at: int, period: int) -> int:
    """How often the hops at a place come again and again; 1 if it is not worth saying."""
    said = _said(hops)
    times = 1
    while said[at + times * period : at + (times + 1) * period] == said[at : at + period]:
        times += 1
    return times if times >= 3 else 1


def add_lines(hops: Sequence[Hop], near: str = "") -> None:
    """Adds to the leaking hop the lines of the user's source that put something there.

    Args:
        hops: A path, one of them marked.
        near: The file that made what is held, for hops that do not know theirs.
    """
    at = next((i for i, hop in enumerate(hops) if hop.leak), None)
    if at is None:
        return
    graph = any(hop.kind == "graph" for hop in hops[at + 1 :])
    file, lines = lines_that_keep(hops[: at + 1], near, graph=graph)
    if not lines:
        file, lines = _less_directly(hops, at, near)
    if lines:
        hops[at].text += _kept_at(file, lines)


def _less_directly(hops: Sequence[Hop], at: int, near: str) -> tuple[str, tuple[int, ...]]:
    """Lines that fill the marked hop in other ways than by the name that refers to it."""
    marked, file = hops[at], _file(hops[: at + 1], near)
    if not file:
        return "", ()
    lines: tuple[int, ...] = ()
    named = next((hop for hop in reversed(hops[: at + 1]) if hop.name), marked)
    if marked.kind == "exception":
        lines = source.lines_that_chain(file)
    elif marked.kind in {"attribute", "global"}:
        lines = source.lines_that_name(file)
    if not lines and source.package_of(named.file) == "torch":
        lines = source.lines_that_add(file, "param_groups") if named.name == "state" else ()
    elif not lines and named.kind in {"global", "local", "closure", "attribute"}:
        if any(hop.kind == "object" for hop in hops[hops.index(named) : at + 1]):  # one of C's
            lines = source.lines_that_call(file, named.name)
            lines = lines or source.lines_that_make(file, named.name)
        else:
            lines = source.lines_that_pass(file, named.name)
    if lines:
        return file, lines
    # What a container of the user's holds is a library's: whoever calls that has put it there.
    packages = (source.package_of(hop.file) for hop in hops[at + 1 :] if hop.kind == "attribute")
    package = next((found for found in packages if found not in _EVERYWHERE), "")
    return file, source.lines_that_use(file, package) if package else ()


def lines_that_keep(
    hops: Sequence[Hop], near: str = "", *, graph: bool = False
) -> tuple[str, tuple[int, ...]]:
    """The user's file and the lines in it that put something where the last of these hops leads.

    Args:
        hops: The beginning of a path.
        near: A file for hops that do not know theirs.
        graph: Whether the way goes on through a graph.
    """
    last: dict[str, int] = {}
    for i in reversed(range(len(hops))):
        last.setdefault(hops[i].name, i)
    named = [i for name, i in last.items() if name][:_NAMED]
    for i in named:
        if any(hop.kind.endswith("cache") for hop in hops[i:]):
            break  # its text has the line
        file = _file(hops[: i + 1], near)
        # A library's container is filled by who has its name, and in no other way.
        lines = source.lines_that_add(file, hops[i].name, graph=graph) if file else ()
        if not lines and i == named[0] and hops[i].kind != "closure":
            hooks = any(hop.kind == "hook" for hop in hops[i:])
            lines = _lines_that_set(hops[i], file, hooks=hooks)
        if lines:
            return file, lines
    file, lines = _given_to_a_library(hops, near)
    if not lines and named and hops[named[0]].kind == "closure":
        file = _file(hops[: named[0] + 1], near)
        lines = _lines_that_set(hops[named[0]], file)
    return file, lines


def _given_to_a_library(hops: Sequence[Hop], near: str) -> tuple[str, tuple[int, ...]]:
    """The lines that call what has a container of its own that a library fills."""
    at = next((i for i in reversed(range(len(hops))) if hops[i].name), 0)
    if at == 0 or hops[at].kind != "attribute" or not source.is_library(hops[at].file):
        return "", ()
    owner = next((hop for hop in reversed(hops[:at]) if _is_users(hop, near)), None)
    if owner is not None and owner.name != "self":
        file = owner.file or near
        lines = source.lines_that_call(file, owner.name)
        if lines:
            return file, lines
    file = _file(hops, near)
    package = source.package_of(hops[at].file)
    return file, source.lines_that_use(file, package) if package not in _EVERYWHERE else ()


def _is_users(hop: Hop, near: str) -> bool:
    return bool(hop.name) and not source.is_library(hop.file or near)


def add_lines_of_cycle(hops: Sequence[Hop], near: str) -> None:
    """The same for each reference of a cycle: any of them closes it."""
    for i, hop in enumerate(hops):
        file = _file(hops[: i + 1], near)
        lines = _lines_that_set(hop, file) if hop.name else ()
        if lines:
            hop.text += _kept_at(file, lines)


def _file(hops: Sequence[Hop], near: str) -> str:
    """The user's file that the last of these names is used in; empty if it is a library's."""
    file = next((hop.file for hop in reversed(hops) if not source.is_library(hop.file)), near)
    return "" if source.is_library(file) else file


def _lines_that_set(hop: Hop, file: str, *, hooks: bool = False) -> tuple[int, ...]:
    if not file or hop.kind not in {"attribute", "closure"}:
        return ()
    lines = source.lines_that_set(file, hop.name) if hop.kind == "attribute" else ()
    registered = not source.is_library(hop.file) or source.package_of(hop.file) == "torch"
    hooks = hooks or hop.kind == "closure" or "hook" in hop.name
    return lines or (source.lines_that_register(file, hooks=hooks) if registered else ())


def _kept_at(file: str, lines: Sequence[int]) -> str:
    where = ", ".join(f"{Path(file).name}:{line}" for line in lines[:3])
    return f" (kept at {where})"
