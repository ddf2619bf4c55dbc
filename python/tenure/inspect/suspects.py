"""What holds the storages that a verdict suspects: looks at the live process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure.inspect import advice, census, holders

__all__ = ["Holding", "look"]

_MOST_PATHS = 3  # told for one suspect
_MOST_LOOKED_AT = 64  # storages of one suspect
_MOST_IDS = 32


@dataclass
class Holding:
    """How the storages of one origin are held.

    Attributes:
        paths: Ways from a root to a storage, the most frequent first, as JSON hops.
        cycle: Whether no root holds them: they hold each other.
        collectable: Of a cycle: whether Python's collector could free it.
        advice: What to do, where the pattern is known.
        residue: References to the storages that nobody found.
        frees: Bytes that would go with what is marked as growing; 0 if others hold them too.
        storages: Ids of some of them, as in the recording.
    """

    paths: list[list[dict[str, Any]]] = field(default_factory=list)
    cycle: bool = False
    collectable: bool = False
    advice: str = ""
    residue: int = 0
    frees: int = 0
    storages: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """As it is written to recordings."""
        return dict(self.__dict__)


def look(origins: Sequence[int], now: int) -> tuple[dict[int, Holding], list[census.Cycle]]:
    """Finds what holds the storages of these origins, and all cycles that nothing holds.

    Must run where no other thread changes the autograd graph: on the training thread between steps.

    Args:
        origins: Ids of origins.
        now: The current step. What was born just before it is alive for good reason.
    """
    references = _C.References(holders.own_objects())
    nodes = {address: node for address, _, node, _ in references.storages()}
    out: dict[int, Holding] = {}
    for origin in origins:
        alive = sorted(_C.alive_of({origin}), key=lambda row: row[1])
        lasting = [row for row in alive if row[3] + 2 < now] or alive
        found = [(row, nodes[row[0]]) for row in lasting if row[0] in nodes]
        if found:
            out[origin] = _holding(references, found)
    return out, census.cycles_in(references)


def _holding(references: _C.References, found: list[tuple[Any, int]]) -> Holding:
    holding = Holding(storages=[row[1] for row, _ in found][-_MOST_IDS:])
    group = [node for _, node in found]
    steps = [row[3] for row, _ in found]
    stride = len(group) // _MOST_LOOKED_AT + 1
    ways: dict[str, tuple[int, int]] = {}  # signature: how often, and a node
    for node in group[stride // 2 :: stride]:
        kept_by = _signature(references, node)
        often, example = ways.get(kept_by, (0, node))
        ways[kept_by] = (often + 1, example)
        seen, actual = references.counts(node)
        holding.residue = max(holding.residue, actual - seen)
    for _, node in sorted(ways.values(), reverse=True)[:_MOST_PATHS]:
        way = _path(references, node, group, steps)
        holding.paths.append([hop.as_json() for hop in way.hops])
        if len(holding.paths) == 1:
            holding.cycle, holding.collectable, holding.advice = way.cycle, way.free, way.advice
            holding.frees = way.frees
    return holding


def _signature(references: _C.References, node: int) -> str:
    _, path, cycle, _ = references.retention(node)
    text = " ".join(hop.text for hop in holders.retention_path([*cycle, *path]))
    return re.sub(r"\d+", "", text)


@dataclass
class _Way:
    hops: list[holders.Hop]
    advice: str
    cycle: bool = False
    free: bool = False
    frees: int = 0


def _path(references: _C.References, node: int, group: list[int], steps: list[int]) -> _Way:
    reached, path, cycle, free = references.retention(node)
    if not reached and cycle:
        # The path begins in the cycle; the cycle closes with its own first element.
        hops = holders.retention_path([*cycle, cycle[0]])
        for hop in hops:
            hop.leak = True
        out = holders.retention_path(path)
        return _Way([*hops, *out[1:]], advice.for_cycle(cycle, free), cycle=True, free=free)
    hops = holders.retention_path(path)
    mark = _growing(references.labels_behind(node, group, steps))
    for hop in hops:
        hop.leak = mark in hop.elements
    if hops and not any(hop.leak for hop in hops):
        hops[-1].leak = True
    holders.add_lines(hops)
    frees = references.gone_with(node)[mark] if path else 0
    return _Way(hops, advice.for_path(hops, path), frees=frees)


def _growing(steps: list[int]) -> int:
    """The element of a path that refers to more with every step.

    Args:
        steps: For each element, from how many steps the storages come that lie behind it.

    Before that element there are all steps, behind it far fewer. In a chain that gets longer with
    every step each element has all but one of the last's: there it is the chain's first.
    """
    if len(steps) < 2:
        return 0
    lost = next((i for i in range(len(steps) - 1) if steps[i + 1] < steps[0]), 0)
    parting = next((i for i in range(len(steps) - 1) if steps[i + 1] < 0.9 * steps[0]), lost)
    if parting - lost > 6:
        return lost
    return max(range(len(steps) - 1), key=lambda i: (steps[i] / max(1, steps[i + 1]), -i))
