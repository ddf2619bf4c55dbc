"""A thousand random graphs: what is scheduled is right, and what is broken is caught."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sharded_graphs import INSERTED, MOVES, OPS, Case, all_of, place_of, same_bits
from tenure.sharding.compiled import Gradient, peak, prove, schedule

aten: Any = torch.ops.aten
SEEDS_A_BLOCK = 100
BLOCKS = int(os.environ.get("TENURE_GRAPH_BLOCKS", "10"))  # `make soak` does 32


def beside(node: fx.Node, step: str) -> fx.Node:
    """The nearest node before or after that was not inserted."""
    node = getattr(node, step)
    while node.target in INSERTED:
        node = getattr(node, step)
    return node


def aliases_before(case: Case, node: fx.Node, of: fx.Node) -> list[fx.Node]:
    """The values before a node that really lie in the unit of an inserted one."""
    number: Any = of.args[2]
    flat = place_of(case.world.flats[number])
    return [one for one, value in case.pool if place_of(value) == flat and one < node]


def release_early(case: Case) -> None:
    node = case.pick(OPS.release)
    beside(node, "prev").prepend(node)


def wait_late(case: Case) -> None:
    node = case.pick(OPS.wait)
    beside(node, "next").append(node)


def gather_after_wait(case: Case) -> None:
    node = case.pick(OPS.gather)
    next(one for one in all_of(case.graph, OPS.wait) if one.args[2] == node.args[2]).append(node)


def drop(case: Case) -> None:
    case.graph.erase_node(case.pick(*MOVES))


def repeat(case: Case) -> None:
    node = case.pick(*MOVES)
    with case.graph.inserting_after(node):
        case.graph.create_node(node.op, node.target, node.args)


def wrong_unit(case: Case) -> None:
    node = case.pick(*MOVES)
    node.update_arg(2, case.random.choice([n for n in range(11) if n != node.args[2]]))


def wrong_placeholders(case: Case) -> None:
    node = case.pick(*MOVES)
    given: Any = node.args[0]
    node.update_arg(0, given[1:] if case.random.random() < 0.5 else [*given, given[0]])


def read_late(case: Case) -> None:
    node = case.pick(OPS.release)
    with case.graph.inserting_after(node):
        x = case.random.choice(aliases_before(case, node, node))
        case.graph.call_function(aten.sin.default, (x,))


def write_or_reduce(case: Case) -> None:
    node = case.pick(OPS.release)
    with case.graph.inserting_before(node):
        x = case.random.choice(aliases_before(case, node, node))
        reduce = (OPS.reduce, (x, 0, node.args[2], 0, 0))
        case.graph.call_function(*case.random.choice([reduce, (aten.zero_.default, (x,))]))


def see_no_lists(case: Case) -> None:
    """Takes a list, a tuple or a reshape for the last reader, as DeepCompile's pass does."""
    plain = {aten.t.default, aten.view.default, aten.slice.Tensor, aten.select.int}
    place = {node: number for number, node in enumerate(case.graph.nodes)}
    for node in all_of(case.graph, OPS.release):
        given: Any = node.args[0]
        seen, readers = list(given), []
        for one in seen:
            seen += [user for user in one.users if user.target in plain and user not in seen]
            readers += [user for user in one.users if user.target not in {*plain, *INSERTED}]
        readers = [one for one in readers if one.op != "output"]
        last = max(readers, key=place.__getitem__, default=None)
        if last is not None and place[last] < place[beside(node, "prev")]:
            last.append(node)
            return
    release_early(case)


BREAKAGES: list[Callable[[Case], None]] = [
    *(release_early, wait_late, gather_after_wait, drop, repeat, wrong_unit, wrong_placeholders),
    *(read_late, write_or_reduce, see_no_lists, see_no_lists),
]
# Readers in whose result a NaN of any argument shows.
SHOWING = {aten.sin.default, aten.tanh.default, aten.add.Tensor, aten.maximum.default}
SHOWING |= {aten.atan2.default, aten.mm.default, aten.cat.default, aten.add_.Tensor}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_graphs(block: int) -> None:
    shown = 0
    for seed in range(block * SEEDS_A_BLOCK, (block + 1) * SEEDS_A_BLOCK):
        case = Case(seed)
        values, outputs = case.run(gathered=True)
        gradients = schedule_random(case)
        assert prove(case.graph, case.units, OPS) == [], f"seed {seed}"
        check_values(case, values, outputs, gradients)
        if not all_of(case.graph, OPS.release):
            continue
        shown += check_releases(case, values)
        breakage = case.random.choice(BREAKAGES)
        breakage(case)
        assert prove(case.graph, case.units, OPS), f"seed {seed}: {breakage.__name__} not caught"
    assert shown > 2


def schedule_random(case: Case) -> list[Gradient]:
    largest = max(unit.bytes for unit in case.units)
    limit = case.random.choice([None, largest, largest + case.random.randrange(200)])
    gradients = [Gradient(n, n, 0, n) for n in range(5) if case.random.random() < 0.2]
    schedule(
        case.graph,
        case.units,
        OPS,
        model=0,
        prefetch=case.random.randrange(4),
        limit=limit,
        gradients=gradients,
    )
    if limit is not None:
        in_use = peak(case.graph, case.units, dataclasses.replace(OPS, gather=OPS.wait))
        assert peak(case.graph, case.units, OPS) <= max(limit, in_use), f"seed {case.seed}"
    return gradients


def check_values(
    case: Case, values: dict[fx.Node, Tensor], outputs: list[Any], gradients: list[Gradient]
) -> None:
    after, now = case.run(gathered=False)
    assert case.world.is_empty(), f"seed {case.seed}"
    for node, value in values.items():
        assert same_bits(after[node], value), f"seed {case.seed}: {node}"
    reduced = {gradient.output for gradient in gradients}
    for number, value in enumerate(outputs):
        if number in reduced:
            assert now[number] is None
            (taken,) = case.world.gradients[(number, 0, number)]
            assert value is None or same_bits(taken, value), f"seed {case.seed}: gradient {number}"
        elif value is not None:
            assert same_bits(now[number], value), f"seed {case.seed}: output {number}"


def check_releases(case: Case, values: dict[fx.Node, Tensor]) -> int:
    """Each release one reader earlier is caught, and is wrong: returns how often that showed."""
    shown = 0
    for node in all_of(case.graph, OPS.release):
        reader, old = beside(node, "prev"), node.prev
        reader.prepend(node)
        complaints = prove(case.graph, case.units, OPS)
        assert any(reader.name in one for one in complaints), f"seed {case.seed}: {node} is late"
        direct = set(reader.all_input_nodes) & set(aliases_before(case, reader, node))
        if case.seed % 5 == 0 and reader.target in SHOWING and direct:
            wrong, _ = case.run(gathered=False)
            assert bool(wrong[reader].isnan().any()), f"seed {case.seed}: {reader}"
            assert not bool(values[reader].isnan().any())
            shown += 1
        old.append(node)
    return shown
