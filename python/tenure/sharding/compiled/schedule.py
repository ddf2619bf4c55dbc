"""Where a graph gathers the units of its parameters, releases them, and hands over gradients.

Note [One interval a unit]
A unit is gathered once in a graph, from before its first read until after its last one, however
long nobody reads it between. A second gather costs communication that the caller did not ask for;
whoever wants it makes two units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tenure.errors import InputError
from tenure.sharding.compiled.aliases import Aliases

__all__ = ["Gradient", "Ops", "Unit", "gather_throughout", "peak", "schedule"]


@dataclass(frozen=True)
class Ops:
    """The ops that are inserted; none of them has a result.

    Attributes:
        gather: `(Tensor(a!)[] parameters, int model, int unit)`: starts a gather; no read yet.
        wait: The same arguments; from here on reads are valid.
        release: The same arguments; from here on no read is.
        reduce: `(Tensor(a!) gradient, int model, int unit, int flat, int parameter)`: takes a
            finished gradient. It leaves the values alone, for others may read them later.
    """

    gather: OpOverload[..., Any]
    wait: OpOverload[..., Any]
    release: OpOverload[..., Any]
    reduce: OpOverload[..., Any]


@dataclass(frozen=True)
class Unit:
    """What is gathered and released as one: all its placeholders in this graph, and its size."""

    number: int
    placeholders: tuple[fx.Node, ...]
    bytes: int


@dataclass(frozen=True)
class Gradient:
    """A position of the graph's output that is the gradient of a parameter."""

    output: int
    unit: int
    flat: int
    parameter: int


@dataclass(frozen=True)
class _Span:
    unit: Unit
    first: int  # the place of the first read
    last: int


def schedule(
    graph: fx.Graph,
    units: Sequence[Unit],
    ops: Ops,
    *,
    model: int,
    prefetch: int = 1,
    limit: int | None = None,
    gradients: Sequence[Gradient] = (),
) -> None:
    """Inserts gathers, waits, releases and reduces into a graph, in place.

    A wait stands right before the first read of any alias of a unit, its release right after the
    last. A unit that nobody reads gets nothing. Gathered bytes exceed `limit` only where the units
    in use at once do.

    A gradient is reduced as soon as nobody writes it any more, and its output becomes None. One
    that may lie in a parameter's storage is cloned first, where it is made.

    Args:
        graph: A graph as AOTAutograd leaves it, all placeholders first.
        units: The sharded parameters among its placeholders.
        ops: What is inserted.
        model: The number of the model, handed on to the ops.
        prefetch: How many units are gathered ahead, in the order of first reads; the first ones
            at the start of the graph. With 0, a gather stands before its wait.
        limit: Gathered ahead only while all that is gathered stays within these bytes.
        gradients: Which outputs are gradients; a position that is None already is skipped.

    Raises:
        InputError: The graph writes into a parameter, or arguments do not fit it.
    """
    _check(graph, units, gradients, prefetch)
    _reduce_gradients(graph, units, ops, model, gradients)
    nodes = list(graph.nodes)
    spans = _spans(graph, nodes, units)
    plan = _Plan(spans, prefetch, limit)
    waits: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        waits.setdefault(span.first, []).append(number)
    start = next(place for place, node in enumerate(nodes) if node.op != "placeholder")

    def insert(op: OpOverload[..., Any], chosen: Iterable[Unit]) -> None:
        for unit in chosen:
            _call(graph, op, (list(unit.placeholders), model, unit.number))

    with graph.inserting_before(nodes[start]):
        insert(ops.gather, plan.ahead(-1))
    for place in range(start, len(nodes) - 1):
        with graph.inserting_before(nodes[place]):
            for number in waits.get(place, ()):
                insert(ops.gather, plan.ahead(number))
                insert(ops.wait, [spans[number].unit])
        with graph.inserting_before(nodes[place + 1]):
            insert(ops.release, plan.done(place))
            insert(ops.gather, plan.again())
    graph.lint()


def gather_throughout(
    graph: fx.Graph,
    units: Sequence[Unit],
    ops: Ops,
    *,
    model: int,
    gradients: Sequence[Gradient] = (),
) -> None:
    """Gathers all units before the graph's first node and releases them after its last.

    For graphs whose reads are not known for sure. Arguments and errors are those of `schedule()`.
    """
    _check(graph, units, gradients, 0)
    _reduce_gradients(graph, units, ops, model, gradients)
    nodes = list(graph.nodes)
    start = next(node for node in nodes if node.op != "placeholder")
    for op, before in ((ops.gather, start), (ops.wait, start), (ops.release, nodes[-1])):
        with graph.inserting_before(before):
            for unit in units:
                _call(graph, op, (list(unit.placeholders), model, unit.number))
    graph.lint()


def peak(graph: fx.Graph, units: Sequence[Unit], ops: Ops) -> int:
    """The most bytes that are gathered at once along a scheduled graph."""
    size = {unit.number: unit.bytes for unit in units}
    now = most = 0
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (ops.gather, ops.release):
            number = node.args[2]
            assert isinstance(number, int)
            now += size[number] if node.target is ops.gather else -size[number]
            most = max(most, now)
    return most


class _Plan:
    """Which gathers may start at a point of the graph, in the order of first reads."""

    def __init__(self, spans: list[_Span], prefetch: int, limit: int | None) -> None:
        self._spans = spans
        self._prefetch = prefetch
        self._limit = limit
        self._needed = -1
        self._started = 0
        self._bytes = 0
        self._freed = False

    def ahead(self, needed: int) -> list[Unit]:
        """What starts where the span of this number is read first: it, and those after it.

        All that started before it is in use by now, so only use can exceed the limit.
        """
        self._needed = needed
        started = [self._start()] if self._started <= needed else []
        return started + self._fill()

    def done(self, place: int) -> list[Unit]:
        """What is read last at a place."""
        units = [span.unit for span in self._spans if span.last == place]
        self._bytes -= sum(unit.bytes for unit in units)
        self._freed = bool(units)
        return units

    def again(self) -> list[Unit]:
        """What starts because something was released."""
        return self._fill() if self._freed else []

    def _fill(self) -> list[Unit]:
        started = []
        until = min(self._needed + self._prefetch + 1, len(self._spans))
        while self._started < until:
            next_bytes = self._spans[self._started].unit.bytes
            if self._limit is not None and self._bytes + next_bytes > self._limit:
                break
            started.append(self._start())
        return started

    def _start(self) -> Unit:
        unit = self._spans[self._started].unit
        self._started += 1
        self._bytes += unit.bytes
        return unit


def _spans(graph: fx.Graph, nodes: list[fx.Node], units: Sequence[Unit]) -> list[_Span]:
    aliases = Aliases(graph)
    owner = {node: unit for unit in units for node in unit.placeholders}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for origin in aliases.writes(node):
            if origin in owner:
                raise InputError(
                    f"{node} writes into {origin}, a parameter of unit {owner[origin].number}:"
                    " a sharded parameter is only read in a compiled graph"
                )
        for number in {owner[origin].number for origin in aliases.reads(node) if origin in owner}:
            first.setdefault(number, place)
            last[number] = place
    spans = [
        _Span(unit, first[unit.number], last[unit.number]) for unit in units if unit.number in first
    ]
    return sorted(spans, key=lambda span: span.first)


def _reduce_gradients(
    graph: fx.Graph, units: Sequence[Unit], ops: Ops, model: int, gradients: Sequence[Gradient]
) -> None:
    if not gradients:
        return
    aliases = Aliases(graph)
    parameters = {node for unit in units for node in unit.placeholders}
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    first = next(place for place, node in enumerate(nodes) if node.op != "placeholder")
    written = {origin: place for node, place in places.items() for origin in aliases.writes(node)}
    left: list[Any] = list(nodes[-1].args[0])
    for gradient in gradients:
        made = nodes[-1].args[0][gradient.output]
        if made is None:
            continue
        left[gradient.output] = None
        origins = aliases.of(made)
        after = max([places[made], *(written[one] for one in origins if one in written)])
        with graph.inserting_before(nodes[max(after + 1, first)]):
            taken = _clone(graph, made) if origins & parameters else made
            _call(
                graph,
                ops.reduce,
                (taken, model, gradient.unit, gradient.flat, gradient.parameter),
            )
    nodes[-1].args = (tuple(left),)


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    clone = graph.call_function(torch.ops.aten.clone.default, (node,))
    value = node.meta.get("val")
    clone.meta["val"] = value.clone() if isinstance(value, torch.Tensor) else value
    return clone


def _call(graph: fx.Graph, op: OpOverload[..., Any], args: tuple[Any, ...]) -> None:
    graph.call_function(op, args).meta["val"] = None


def _check(
    graph: fx.Graph, units: Sequence[Unit], gradients: Sequence[Gradient], prefetch: int
) -> None:
    if prefetch < 0:
        raise InputError(f"prefetch is a number of units, not {prefetch}")
    nodes = list(graph.nodes)
    kinds = [node.op == "placeholder" for node in nodes]
    if not nodes or nodes[-1].op != "output" or kinds != sorted(kinds, reverse=True):
        raise InputError("the graph does not begin with all placeholders and end with its output")
    owner: dict[fx.Node, int] = {}
    for unit in units:
        for node in unit.placeholders:
            if node.graph is not graph or node.op != "placeholder":
                raise InputError(f"unit {unit.number}: {node} is no placeholder of this graph")
            if owner.setdefault(node, unit.number) != unit.number:
                raise InputError(f"{node} belongs to unit {owner[node]} and unit {unit.number}")
    if len({unit.number for unit in units}) < len(units):
        raise InputError("two units have the same number")
    outputs = nodes[-1].args[0]
    for gradient in gradients:
        if not isinstance(outputs, list | tuple) or not (0 <= gradient.output < len(outputs)):
            raise InputError(f"the graph has no output {gradient.output} to be a gradient")
        if not isinstance(outputs[gradient.output], fx.Node | None):
            raise InputError(f"output {gradient.output} is a constant and no gradient")
