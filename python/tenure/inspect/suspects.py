"""What holds the storages that a verdict suspects: looks at the live process."""

from __future__ import annotations

import collections
import functools
import itertools
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tenure import _C
from tenure.inspect import advice, census, holders
from tenure.inspect.graphs import Growing
from tenure.inspect.holders import Element
from tenure.inspect.hops import first_alike, lines_that_keep

__all__ = ["NODE_BYTES", "Holding", "look", "look_at_graphs"]

NODE_BYTES = 700  # of an autograd node with what belongs to it; 600 to 900 were measured

_OUTSIDE = "nothing with a name: C++ code, or a container that is just being built"
_ENGINE = torch.autograd.graph.__file__
_MOST_PATHS = 3  # told for one suspect
_MOST_LOOKED_AT = 24  # storages of one suspect
_MOST_IDS = 32
_MOST_HOLDERS = 16  # of one thing that are asked for a line
_MANY_FALLS = 3  # a little each before the great one: a chain, and no containers in containers
_JOINING = {"aten::cat", "aten::stack", "aten::hstack", "aten::vstack", "aten::constant_pad_nd"}


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
        bounded: Whether what is marked has a bound and is not full.
        nodes: Autograd nodes of graphs that are kept for themselves, not for what they saved.
        storages: Ids of some of them, as in the recording.
    """

    paths: list[list[dict[str, Any]]] = field(default_factory=list)
    cycle: bool = False
    collectable: bool = False
    advice: str = ""
    residue: int = 0
    frees: int = 0
    bounded: bool = False
    nodes: int = 0
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
    out: dict[int, Holding] = {}
    with _C.References(holders.own_objects()) as references:
        nodes = {}
        for address, _, node, _, own in references.storages():
            nodes[address] = nodes[own] = node
        for origin in origins:
            alive = sorted(_C.alive_of({origin}), key=lambda row: row[1])
            lasting = [row for row in alive if row[3] + 2 < now] or alive
            found = [(row, nodes[row[0]]) for row in lasting if row[0] in nodes]
            if alive:
                out[origin] = _holding(references, found, _file_of(origin))
        return out, census.cycles_in(references)


def in_backward_elsewhere() -> bool:
    """Whether another thread is inside autograd's engine, which changes what a look reads."""
    me = threading.get_ident()
    return any(
        frame.f_code.co_filename == _ENGINE
        for thread, frame in sys._current_frames().items()
        if thread != me
    )


def are_kept(origins: Sequence[int], now: int) -> list[int]:
    """Those origins whose newest storage an object keeps as its attribute, from step to step.

    What is merely left over from the last step is held by local and global variables.
    """
    found, _ = look(origins, now)
    return [
        origin
        for origin, holding in found.items()
        if any(_is_state(path) for path in holding.paths[:1])
    ]


def joined(origins: Sequence[int]) -> list[int]:
    """Those that are made by joining tensors: what there was, and more of it."""
    return [origin for origin in origins if _C.origin(origin)["op"] in _JOINING]


def _is_state(path: list[dict[str, Any]]) -> bool:
    named = [hop for hop in path if hop["kind"] not in {"tensor", "object", "item"}]
    return bool(named) and named[-1]["kind"] == "attribute"


def _file_of(origin: int) -> str:
    """The file of the line that made the storages."""
    made = _C.origin(origin)
    site: str = made["forward_site"] or made["site"]
    return site.rpartition(" ")[0].rpartition(":")[0]


def _holding(references: _C.References, found: list[tuple[Any, int]], file: str) -> Holding:
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
        way = _path(references, node, group, steps, file)
        holding.paths.append([hop.as_json() for hop in way.hops])
        if len(holding.paths) == 1:
            holding.cycle, holding.collectable, holding.advice = way.cycle, way.free, way.advice
            holding.frees, holding.bounded = way.frees, way.bounded
    return holding


def look_at_graphs(growing: Growing) -> tuple[int, int, Holding] | None:
    """What holds the graphs that lead to a leaf.

    Returns the origin of the storages that head them, how many of their nodes hand gradients to the
    leaf, and the holding; None if nothing that was seen born heads them, or they are of one step.
    """
    if growing.leaf is None:
        return None
    with _C.References(holders.own_objects()) as references:
        found = references.users_of(growing.leaf)
        if not found or not growing.are_kept([made for _, made in found]):
            return None
        users = [node for node, _ in found]
        older = users[: -max(2, len(users) // 8)] or users  # the last loss is in use
        node = older[len(older) // 2]
        head = _head(references, node)
        origin = _C.origin_of(head) if head is not None else None
        if origin is None:
            return None
        way = _path(references, node, older, list(range(len(older))), _file_of(origin))
        holding = Holding(
            [[hop.as_json() for hop in way.hops]],
            way.cycle,
            way.free,
            way.advice or advice.DETACH,
            bounded=way.bounded,
            nodes=references.autograd_nodes(),
        )
        return origin, len(users), holding


def _head(references: _C.References, node: int) -> torch.Tensor | None:
    """The tensor through which the way to a node enters the graph."""
    _, path, *_ = references.retention(node)
    entered = next((i for i, element in enumerate(path) if element[0] == "autograd"), 0)
    held = [shown for kind, shown, *_ in path[:entered] if kind == "object"]
    last: Any = held[-1] if held else None
    return last if issubclass(type(last), torch.Tensor) else None


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
    bounded: bool = False


def _path(
    references: _C.References, node: int, group: list[int], steps: list[int], file: str
) -> _Way:
    """The way to one of the group, whose storages come from these steps and were made in `file`."""
    reached, path, cycle, free = references.retention(node)
    if not reached and cycle:
        # The path begins in the cycle, which closes with that element.
        cycle, path = _from_an_owner(cycle, path)
        hops = holders.retention_path([*cycle, *path])
        _breaking([hop for hop in hops if hop.elements[0] < len(cycle)]).leak = True
        holders.add_lines_of_cycle(hops, file)
        hint = advice.for_cycle(cycle, free)
        return _Way(holders.collapsed(hops), hint, cycle=True, free=free)
    hops = holders.retention_path(path)
    if not reached:
        outside = holders.Hop("native", _OUTSIDE, leak=True)
        return _Way([outside, *holders.collapsed(hops)], "")
    mark = _mark(hops, references.labels_behind(node, group, steps))
    hops = _through_a_name(references, node, mark, hops)
    hops = _through_what_is_carried(references, node, mark, hops)
    hops = _through_a_line(references, node, mark, hops, file)
    holders.add_lines(hops, file)
    frees = references.gone_with(node)[mark] if path else 0
    bounded = bool(path) and _has_room(path, mark)
    hint = advice.for_path(hops, path)
    return _Way(holders.collapsed(hops), hint, frees=frees, bounded=bounded)


def _through_a_name(
    references: _C.References, node: int, mark: int, hops: list[holders.Hop]
) -> list[holders.Hop]:
    """The way through a variable or attribute that is what grows, if the shortest has none.

    That may lead through an object of C's: a task has the callback `tasks.discard`, whose set
    grows.
    """
    at = next((i for i, hop in enumerate(hops) if hop.leak), 0)
    if at == 0 or hops[at - 1].kind != "object":
        return hops
    way = references.way(node)
    _, path, *_ = references.retention(node)
    found = [hops]
    for holder in references.referring_to(way[mark]):
        reached, before, *_ = references.retention(holder)
        if not reached or way[mark] in references.way(holder):
            continue
        ahead = [*before[:-1], references.element(holder, way[mark])]
        other = holders.retention_path([*ahead, *path[mark:]])
        marked = next((i for i, hop in enumerate(other) if len(ahead) in hop.elements), 0)
        if marked > 0 and other[marked - 1].name:
            other[marked].leak = True
            found.append(other)
    return min(found[1:] or found, key=len)


def _through_what_is_carried(
    references: _C.References, node: int, mark: int, hops: list[holders.Hop]
) -> list[holders.Hop]:
    """The way through a variable that the program makes of itself, ``out, h = cell(x, h)``.

    The shortest way into the graph that gets longer with each step may lead through ``out``.
    """
    _, path, *_ = references.retention(node)
    at = next((i for i, hop in enumerate(hops) if hop.leak), 0)
    if hops[at].kind != "graph" or lines_that_keep(hops[:at])[1]:
        return hops
    found = []
    for way in references.heads_of(references.way(node)[mark]):
        reached, before, *_ = references.retention(way[0])
        if not reached or any(element[0] == "autograd" for element in before):
            continue
        ahead = [*before[:-1], *(references.element(*pair) for pair in itertools.pairwise(way))]
        other = holders.retention_path([*ahead, *path[mark:]])
        marked = next((i for i, hop in enumerate(other) if len(ahead) in hop.elements), 0)
        if lines_that_keep(other[:marked])[1]:
            other[marked].leak = True
            found.append(other)
    return min(found or [hops], key=len)


def _through_a_line(
    references: _C.References, node: int, mark: int, hops: list[holders.Hop], file: str
) -> list[holders.Hop]:
    """The way through another holder, if no line of the program fills the one that was found.

    An optimizer that is made anew in each step has a list of all that a `ParameterList` keeps.
    """
    at = next((i for i, hop in enumerate(hops) if hop.leak), 0)
    way = references.way(node)
    told = hops[at].kind == "graph" or any(hop.kind.endswith("cache") for hop in hops)
    if told or mark + 1 >= len(way) or lines_that_keep(hops[: at + 1], file)[1]:
        return hops
    _, path, *_ = references.retention(node)
    held = way[mark + 1]
    found = []
    for holder in references.referring_to(held)[:_MOST_HOLDERS]:
        reached, before, *_ = references.retention(holder)
        if holder == way[mark] or not reached or held in references.way(holder):
            continue
        ahead = [*before[:-1], references.element(holder, held)]
        other = holders.retention_path([*ahead, *path[mark + 1 :]])
        marked = next((i for i, hop in enumerate(other) if len(ahead) - 1 in hop.elements), 0)
        if lines_that_keep(other[: marked + 1], file)[1]:
            other[marked].leak = True
            found.append(other)
    return min(found or [hops], key=len)


def _has_room(path: Sequence[Element], mark: int) -> bool:
    """Whether a container will drop what is in it, but has not begun to."""
    owner = path[mark][1]
    if isinstance(owner, collections.deque):
        return owner.maxlen is not None and len(owner) < owner.maxlen
    if isinstance(owner, functools._lru_cache_wrapper):
        cache = owner.cache_info()
        return cache.maxsize is not None and cache.currsize < cache.maxsize
    return any(
        isinstance(shown, torch.optim.LBFGS) and _is_history(shown, owner)
        for _, shown, *_ in path[:mark]
    )


def _is_history(optimizer: torch.optim.LBFGS, owner: Any) -> bool:
    """Whether these are directions of former steps, of which it will keep so many."""
    most = optimizer.param_groups[0]["history_size"]
    lists = [held for state in optimizer.state.values() for held in state.values()]
    return any(owner is held for held in lists) and len(owner) < most


def _from_an_owner(
    cycle: list[Element], path: list[Element]
) -> tuple[list[Element], list[Element]]:
    """A cycle and the path out of it, begun where the attributes' owner is and not within them."""
    if len(cycle) > 1 and isinstance(path[0][1], dict):
        owner = cycle[-1][1]
        if path[0][1] is getattr(owner, "__dict__", None):
            return [cycle[-1], *cycle[:-1]], [cycle[-1], *path]
    return cycle, path


def _breaking(cycle: list[holders.Hop]) -> holders.Hop:
    """The reference of a cycle that someone wrote, rather than torch."""
    kinds = ["closure", "attribute", "ctx", "default", "local", "item", "hook"]
    return min(cycle, key=lambda hop: kinds.index(hop.kind) if hop.kind in kinds else len(kinds))


def _mark(hops: list[holders.Hop], steps: list[int]) -> int:
    """Marks the reference that grows, and returns the element that has it."""
    if not hops:
        return 0
    at = _growing(steps)
    marked = next((hop for hop in hops if at in hop.elements), hops[-1])
    link = _first_link(hops, steps)
    if steps[0] == steps[-1]:  # one storage that gets larger: who refers to it by name
        marked = next((hop for hop in reversed(hops) if hop.name), marked)
        at = marked.target
    elif link is not None:
        marked, at = link, link.elements[0]
    marked.leak = True
    return min(at, len(steps) - 1)


def _first_link(hops: list[holders.Hop], steps: list[int]) -> holders.Hop | None:
    """Where a chain of objects begins that is too short yet for `_growing` to tell.

    Behind each of its links there is a step or two fewer, before the one that has the storage. The
    last steps are not among those counted, so behind its first few there are as many.
    """
    falls = [i for i in range(_parting(steps)) if steps[i + 1] < steps[i]]
    if len(falls) < _MANY_FALLS:
        return None
    at = next((i for i, hop in enumerate(hops) if falls[0] in hop.elements), None)
    if at is None or hops[at].kind == "graph":
        return None
    return hops[first_alike(hops, at)]


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
    return lost if parting - lost > 6 else _parting(steps)


def _parting(steps: list[int]) -> int:
    """Behind which element there is the smallest part of the steps that there are before it."""
    return max(
        range(len(steps) - 1), key=lambda i: (steps[i] / max(1, steps[i + 1]), -i), default=0
    )
