"""Everything that is alive, by what holds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure.inspect import holders
from tenure.inspect.words import size
from tenure.leases import leases

__all__ = ["Census", "Cycle", "Held", "census", "census_in", "cycles_in"]

_MOST_CYCLES = 256  # that are put into words
_MOST_TOLD = 12  # lines of each kind


@dataclass(frozen=True)
class Held:
    """Storages that one variable holds: the shortest way to each begins there.

    Attributes:
        holder: The variable, in words.
        nbytes: Their size.
        count: How many there are.
    """

    holder: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Cycle:
    """Objects that hold each other although nothing else holds them.

    Attributes:
        path: One way around, in words.
        nbytes: What all cycles of this kind keep.
        count: How many of this kind there are.
        collectable: Whether Python's collector can free them; those through autograd it cannot see.
    """

    path: str
    nbytes: int
    count: int
    collectable: bool

    def as_json(self) -> dict[str, Any]:
        """As it is written to recordings and verdicts."""
        shown = {"bytes": self.nbytes, "count": self.count, "collectable": self.collectable}
        return {"text": self.path, **shown}


@dataclass(frozen=True)
class Census:
    """All storages that are alive. Print it, or read its fields.

    Attributes:
        nbytes: Bytes alive.
        rooted: Of these, bytes with a way from a root: a variable, a global, a running frame.
        in_cycles: Bytes that only cycles hold.
        leased: Bytes that Tenure alone holds: activations that it moved to the host.
        residue: The rest: bytes that neither Python nor autograd explains. C++ code holds them.
        held: What the variables hold, the largest first.
        owners: What Tenure alone holds, by owner, the largest first.
        cycles: Kinds of cycles, the heaviest first.
    """

    nbytes: int
    rooted: int
    in_cycles: int
    leased: int
    residue: int
    held: list[Held] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    owners: list[Held] = field(default_factory=list)

    def __str__(self) -> str:
        """Some lines."""
        lines = [f"{size(self.nbytes)} alive, {size(self.rooted)} of it held by name"]
        lines += [f"  {size(h.nbytes)}  {h.holder}, {h.count:,} storages" for h in self.held]
        del lines[1 + _MOST_TOLD :]
        for owner in self.owners[:_MOST_TOLD]:
            what = f"offloaded: {owner.holder}, {owner.count:,} leases"
            lines.append(f"  {size(owner.nbytes)}  {what}")
        for cycle in self.cycles[:_MOST_TOLD]:
            free = "Python's collector frees them" if cycle.collectable else "nothing frees them"
            lines.append(f"  {size(cycle.nbytes)}  {cycle.count:,} cycles, {free}: {cycle.path}")
        if self.residue:
            lines.append(f"  {size(self.residue)}  held from C++ code alone")
        return "\n".join(lines)


def census() -> Census:
    """Says who holds every byte of every storage that is alive.

    Looks at every object of the process: some hundred milliseconds in a large program. Call it
    where no other thread runs backward. Bytes that only C++ code holds are known while the process
    is watched (:func:`tenure.watch`, ``tenure run``); otherwise they cannot be seen.

    Example:
        >>> import tenure, torch
        >>> cache = [torch.zeros(1 << 20) for _ in range(4)]
        >>> found = tenure.census()
        >>> any(h.holder.startswith("cache") and h.nbytes >= 4 << 22 for h in found.held)
        True
        >>> del cache
    """
    with _C.References(holders.own_objects()) as references:
        return census_in(references)


def census_in(references: _C.References) -> Census:
    """The same from a look that is under way."""
    seen = references.storages()
    rooted = sum(nbytes for _, nbytes, _, reached, _ in seen if reached)
    cycles = cycles_in(references)
    in_cycles = sum(cycle.nbytes for cycle in cycles)
    known = {address for data, _, _, _, own in seen for address in (data, own)}
    unseen = sum(nbytes for address, nbytes in _C.alive_storages() if address not in known)
    loose = sum(nbytes for _, nbytes, _, reached, _ in seen if not reached)
    owners = _leased_alone()
    residue = loose - in_cycles + unseen
    leased = min(residue, sum(owner.nbytes for owner in owners))
    return Census(
        rooted + loose + unseen,
        rooted,
        in_cycles,
        leased,
        residue - leased,
        _held(references),
        cycles,
        owners,
    )


def _leased_alone() -> list[Held]:
    """What Tenure moved to the host, by owner: nothing else knows of it."""
    return [
        Held(f"{owner.name}, {owner.site}, on the host", totals.bytes, totals.leases)
        for owner, totals in leases().by_owner().items()
        if owner.kind == "host_copy"
    ]


def _held(references: _C.References) -> list[Held]:
    sums: dict[str, tuple[int, int]] = {}
    for nbytes, count, node in references.by_beginning():
        _, path, *_ = references.retention(node)
        holder = _first(path)
        before = sums.get(holder, (0, 0))
        sums[holder] = (before[0] + nbytes, before[1] + count)
    found = [Held(holder, nbytes, count) for holder, (nbytes, count) in sums.items() if nbytes]
    return sorted(found, key=lambda held: -held.nbytes)


def _first(path: Sequence[holders.Element]) -> str:
    return next((hop.text for hop in holders.retention_path(path)), "a root")


def cycles_in(references: _C.References) -> list[Cycle]:
    """The cycles that no root holds, gathered by what they are made of, the heaviest first."""
    kinds: dict[str, Cycle] = {}
    for elements, nbytes, free in references.cycles(_MOST_CYCLES):
        words = _cycle_text(elements)
        kind = re.sub(r"\d+", "", words)
        before = kinds.get(kind, Cycle(words, 0, 0, free))
        kinds[kind] = Cycle(before.path, before.nbytes + nbytes, before.count + 1, free)
    return sorted(kinds.values(), key=lambda cycle: -cycle.nbytes)


def _cycle_text(elements: Sequence[holders.Element]) -> str:
    """One way around, in words; cycles of a kind begin alike."""
    ways = [[*elements[i:], *elements[:i]] for i in range(len(elements))]
    way = min(ways, key=lambda way: [(kind, type(shown).__name__) for kind, shown, *_ in way])
    hops = holders.retention_path([*way, *way[:1]])
    return holders.path_text([*hops[:-1], holders.Hop("cycle", "and around")])
