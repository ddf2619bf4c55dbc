"""The proof that a scheduled graph reads no parameter that has no memory.

It walks over the finished graph in the order of execution, as the program will, and believes
nothing that the scheduler thought: only what a single op does with its arguments is common to both
(`effect_of`). Where nodes carry example values, which of these share a storage is a second witness.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from tenure.sharding.compiled.aliases import Effect, effect_of

if TYPE_CHECKING:
    from tenure.sharding.compiled.schedule import Ops, Unit

__all__ = ["prove"]


class _State(enum.Enum):
    """Where a unit is; the value ends a sentence about somebody who reads it."""

    AWAY = "before it is gathered"
    COMING = "before it was waited for"
    READY = "while it is ready"
    RELEASED = "after it was released"


_GATHERED = (_State.COMING, _State.READY)


@dataclass(eq=False)
class _Cell:
    """One storage, with the units in which it may lie."""

    units: set[int] = field(default_factory=set)
    reduced: str | None = None


def prove(graph: fx.Graph, units: Sequence[Unit], ops: Ops) -> list[str]:
    """Proves that each use of a parameter lies between the wait and the release of its unit.

    Values that may lie in a parameter and leave the graph through its outputs are no use of it.

    Args:
        graph: The finished graph. It is not changed.
        units: All units that have placeholders in it.
        ops: What gathers, waits, releases and reduces in it.

    Returns:
        What is wrong, a sentence each; nothing if it is proven.
    """
    walk = _Walk(units, ops)
    for node in graph.nodes:
        walk.step(node)
    return walk.end()


class _Walk:
    def __init__(self, units: Sequence[Unit], ops: Ops) -> None:
        self._units = {unit.number: unit for unit in units}
        self._ops = ops
        self._state = dict.fromkeys(self._units, _State.AWAY)
        self._cells: dict[fx.Node, list[_Cell]] = {}
        self._owners: dict[fx.Node, int] = {}
        self._witness: dict[int, int] = {}
        self._models: set[Any] = set()
        self._complaints: list[str] = []
        if len(self._units) < len(units):
            self._complain("two units have the same number")
        for unit in units:
            for placeholder in unit.placeholders:
                other = self._owners.setdefault(placeholder, unit.number)
                if other != unit.number:
                    self._complain(f"{placeholder} belongs to unit {other} and unit {unit.number}")
                for storage in _storages(placeholder):
                    self._witness[storage] = unit.number

    def step(self, node: fx.Node) -> None:
        if node.op == "call_function" and node.target in (
            self._ops.gather,
            self._ops.wait,
            self._ops.release,
        ):
            self._move(node)
            self._cells[node] = []
            return
        effect = effect_of(node)
        if node.op == "call_function" and node.target is self._ops.reduce:
            self._reduce(node, effect)
        else:
            self._use(node, effect)
        self._cells[node] = self._cells_after(node, effect)

    def end(self) -> list[str]:
        for number, state in self._state.items():
            if state in _GATHERED:
                self._complain(f"unit {number} is still gathered at the end of the graph")
        return self._complaints

    def _use(self, node: fx.Node, effect: Effect) -> None:
        for number in sorted(self._units_of(effect.touched)):
            state = self._state[number]
            if state is not _State.READY:
                self._complain(f"{node} may read unit {number} {state.value}")
        for number in sorted(self._units_of(effect.written)):
            self._complain(f"{node} may write into a parameter of unit {number}")
        for reduced in sorted({cell.reduced or "" for cell in self._each(effect.written)} - {""}):
            self._complain(f"{node} may write into a gradient after {reduced} took it")

    def _reduce(self, node: fx.Node, effect: Effect) -> None:
        for number in sorted(self._units_of(effect.touched)):
            self._complain(f"{node} takes a gradient that may lie in a parameter of unit {number}")
        for cell in self._each(effect.touched):
            cell.reduced = node.name
        self._see_model(node)

    def _move(self, node: fx.Node) -> None:
        number = _argument(node, 2, "unit")
        if number not in self._units:
            self._complain(f"{node} names unit {number}, which has no placeholders in this graph")
            return
        given = _argument(node, 0, "parameters") or ()
        if sorted(map(str, given)) != sorted(map(str, self._units[number].placeholders)):
            self._complain(f"{node} does not get just the placeholders of unit {number}")
        self._see_model(node)
        state = self._state[number]
        if node.target is self._ops.gather:
            if state in _GATHERED:
                self._complain(f"{node} gathers unit {number}, which is gathered already")
            self._state[number] = _State.COMING
        elif node.target is self._ops.wait:
            if state is not _State.COMING:
                self._complain(f"{node} waits for unit {number} with no gather under way")
            self._state[number] = _State.READY
        else:
            if state is not _State.READY:
                self._complain(f"{node} releases unit {number}, which is not ready")
            self._state[number] = _State.RELEASED

    def _see_model(self, node: fx.Node) -> None:
        self._models.add(_argument(node, 1, "model"))
        if len(self._models) == 2:
            self._complain(f"{node} names another model than the nodes before it")

    def _cells_after(self, node: fx.Node, effect: Effect) -> list[_Cell]:
        reached = self._units_of(effect.touched)
        for cell in self._each(effect.moved):
            cell.units |= reached
        cells = list(dict.fromkeys(self._each(effect.returned)))
        seen = {self._witness[one] for one in _storages(node) if one in self._witness}
        if node in self._owners:
            seen.add(self._owners[node])
        if seen or effect.touched or not cells:
            cells.append(_Cell(seen))
        return cells

    def _each(self, nodes: Iterable[fx.Node]) -> Iterator[_Cell]:
        return (cell for node in nodes for cell in self._cells[node])

    def _units_of(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {number for cell in self._each(nodes) for number in cell.units}

    def _complain(self, text: str) -> None:
        self._complaints.append(text)


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _storages(node: fx.Node) -> list[int]:
    """The storages of a node's example value, if it has one."""
    found = node.meta.get("val")
    values = found if isinstance(found, list | tuple) else [found]
    return [
        value.untyped_storage()._cdata
        for value in values
        if isinstance(value, torch.Tensor) and torch._C._has_storage(value)
    ]
