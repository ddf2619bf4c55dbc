"""Cases by hand: views, lists, writes, gradients, limits, and a transformer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized

import tenure
from sharded_graphs import OPS, Recorder, World, all_of, pair, same_bits, store, test
from tenure.sharding.compiled import Aliases, Gradient, Unit, peak, prove, schedule

aten: Any = torch.ops.aten


class Small:
    """A graph of parameters w and v, in units 0 and 1, and an input x."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.w, self.v, self.x = (self.graph.placeholder(name) for name in "wvx")
        self.units = [Unit(0, (self.w,), 128), Unit(1, (self.v,), 128)]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def schedule(self, *outputs: fx.Node | None, **how: Any) -> list[str]:
        """The names of all nodes after the placeholders; in it is proven and runs right."""
        self.graph.output(outputs)
        given = [torch.rand(4, 4, dtype=torch.float64) for _ in range(3)]
        world = World({0: given[0], 1: given[1]})
        world.enter(gathered=True)
        want = Recorder(self.graph, world)
        want.run(given[0], given[1], given[2].clone())
        schedule(self.graph, self.units, OPS, model=7, **{"prefetch": 0, **how})
        assert prove(self.graph, self.units, OPS) == []
        world.enter(gathered=False)
        got = Recorder(self.graph, world)
        got.run(*given)
        assert world.is_empty()
        assert all(same_bits(got.values[node], value) for node, value in want.values.items())
        return [node.name for node in self.graph.nodes][3:]


def stored(small: Small) -> fx.Node:
    temporary = small.call(aten.zeros_like.default, small.x)
    small.call(store, temporary, small.w)
    return temporary


ALIASES: dict[str, Callable[[Small], fx.Node]] = {
    "split": lambda s: s.call(operator.getitem, s.call(aten.split.Tensor, s.w, 2), 1),
    "chunk": lambda s: s.call(operator.getitem, s.call(aten.chunk.default, s.w, 2), 0),
    "unbind": lambda s: s.call(operator.getitem, s.call(aten.unbind.int, s.w), 3),
    "function": lambda s: s.call(operator.getitem, s.call(pair, s.x, s.w), 0),
    "custom op": lambda s: s.call(test.same.default, s.w),
    "composite op": lambda s: s.call(aten.dropout.default, s.w, 0.5, False),
    "unsafe view": lambda s: s.call(aten._unsafe_view.default, s.w, [16]),
    "a reshape that copies": lambda s: s.call(
        aten.reshape.default, s.call(aten.t.default, s.w), [16]
    ),
    "auto_functionalized": lambda s: s.call(
        operator.getitem, s.call(auto_functionalized, test.pull_.default, x=s.x, y=s.w), 1
    ),
    "another that was set to it": lambda s: s.call(
        aten.set_.source_Tensor, s.call(aten.zeros_like.default, s.x), s.w
    ),
    "another that a function set to it": stored,
    "method": lambda s: s.graph.call_method("t", (s.w,)),
}


@pytest.mark.parametrize("name", ALIASES)
def test_release_comes_after_the_last_reader_of(name: str) -> None:
    small = Small()
    alias = ALIASES[name](small)
    between = small.call(aten.sin.default, small.v)
    late = small.call(aten.sin.default, alias)
    order = small.schedule(between, late)
    assert order.index("release_default_1") == order.index(late.name) + 1
    release = late.next
    late.prepend(release)
    assert prove(small.graph, small.units, OPS) == [f"{late} may read unit 0 after it was released"]


def test_a_view_touches_no_memory() -> None:
    small = Small()
    view = small.call(aten.t.default, small.w)
    first = small.call(aten.sin.default, small.x)
    zeros = small.call(aten.zeros_like.default, view)
    last = small.call(aten.mm.default, first, view)
    order = small.schedule(zeros, last)
    inserted = ["gather_default", "wait_default", last.name, "release_default"]
    assert order == [view.name, first.name, zeros.name, *inserted, "output"]


def test_in_place_and_out_on_temporaries() -> None:
    small = Small()
    temporary = small.call(aten.sin.default, small.w)
    row = small.call(aten.select.int, temporary, 0, 1)
    first = small.call(aten.add_.Tensor, row, small.call(aten.select.int, small.v, 0, 0))
    other = small.call(aten.mm.out, small.x, temporary, out=small.call(aten.sin.default, small.x))
    order = small.schedule(first, other)
    assert order.index("release_default") == order.index(temporary.name) + 1
    assert order.index("release_default_1") == order.index(first.name) + 1


def test_outputs_may_lie_in_a_parameter() -> None:
    small = Small()
    view = small.call(aten.t.default, small.w)
    assert small.schedule(view, small.v) == [view.name, "output"]


@pytest.mark.parametrize("target", [aten.add_.Tensor, operator.iadd, test.pull_.default])
def test_a_write_into_a_parameter_is_refused(target: Any) -> None:
    small = Small()
    row = small.call(aten.select.int, small.w, 0, 0)
    node = small.call(target, row, small.x)
    small.graph.output(())
    with pytest.raises(tenure.InputError, match=f"{node} writes into w"):
        schedule(small.graph, small.units, OPS, model=0)
    assert f"{node} may write into a parameter of unit 0" in prove(small.graph, small.units, OPS)


def test_gradients() -> None:
    small = Small()
    made = small.call(aten.sin.default, small.w)
    half = small.call(aten.slice.Tensor, made, 0, 0, 2)
    written = small.call(aten.tanh_.default, half)
    outputs = (made, None, made, small.x, small.call(aten.t.default, small.v), written)
    gradients = [Gradient(n, 1, 0, n) for n in range(5)]
    order = small.schedule(*outputs, gradients=gradients)
    assert [order[order.index(written.name) + n] for n in (1, 2)] == [
        "reduce_default",
        "reduce_default_1",
    ]
    assert {where[2] for where in World.now.gradients} == {0, 2, 3, 4}
    assert same_bits(World.now.gradients[1, 0, 4][0], World.now.full[1].t().contiguous())
    (out,) = (node for node in small.graph.nodes if node.op == "output")
    assert out.args == ((None, None, None, None, None, written),)
    with small.graph.inserting_before(out):
        late = small.call(aten.zero_.default, made)
    assert prove(small.graph, small.units, OPS) == [
        f"{late} may write into a gradient after reduce_default_1 took it"
    ]


def test_prefetch_and_limit() -> None:
    def gathers(**how: Any) -> list[str]:
        small = Small()
        reads = [small.call(aten.sin.default, one) for one in (small.x, small.w, small.x, small.v)]
        order = small.schedule(*reads, **how)
        assert peak(small.graph, small.units, OPS) <= how.get("limit", 256)
        return order

    assert [gathers(prefetch=0).index(f"gather_default{n}") for n in ("", "_1")] == [1, 6]
    assert [gathers(prefetch=1).index(f"gather_default{n}") for n in ("", "_1")] == [0, 2]
    assert [gathers(prefetch=5).index(f"gather_default{n}") for n in ("", "_1")] == [0, 1]
    assert [gathers(prefetch=5, limit=128).index(f"gather_default{n}") for n in ("", "_1")] == [
        0,
        5,
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Parameter(torch.randn(24, 8) / 3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.norm(x) @ part.t() for part in self.qkv.chunk(3))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("partition", ["default", "min_cut_rematerialization"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_transformer_through_aot_autograd(partition: str, prefetch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 8))
    x = torch.randn(2, 5, 8)
    want = train(model, x, partition, None)
    got = train(model, x, partition, prefetch)
    assert all(same_bits(one, other) for one, other in zip(got, want, strict=True))


def train(model: nn.Module, x: Tensor, partition: str, prefetch: int | None) -> list[Tensor]:
    """The result and the gradients of all parameters; gathered all the time without prefetch."""
    from torch._functorch import partitioners
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_function

    names = [name for name, _ in model.named_parameters()]
    unit_of = [int(name[0]) for name in names]  # the names are those of a Sequential
    flats: dict[int, Any] = {}
    parameters: list[Tensor] = []
    for number in sorted(set(unit_of)):
        own = [p.detach() for name, p in model.named_parameters() if int(name[0]) == number]
        flats[number] = torch.cat([p.flatten() for p in own])
        # By `data` they have version counters of their own, as the C++ ops see to.
        pieces = flats[number].data.split([p.numel() for p in own])
        parameters += [piece.data.view_as(p) for piece, p in zip(pieces, own, strict=True)]
    world = World(flats)
    world.enter(gathered=prefetch is None)
    saved: dict[str, int] = {}

    def finish(graph: fx.Graph, owner: dict[fx.Node, int], gradients: list[Gradient]) -> Any:
        units = [
            Unit(number, tuple(node for node in owner if owner[node] == number), flat.nbytes)
            for number, flat in flats.items()
        ]
        if prefetch is not None:
            schedule(graph, units, OPS, model=0, prefetch=prefetch, gradients=gradients)
            assert len(all_of(graph, OPS.release)) == len(units)
            assert prove(graph, units, OPS) == []
        return make_boxed_func(fx.Interpreter(nn.Module(), graph=graph).run)

    def forward(gm: fx.GraphModule, _: Any) -> Any:
        nodes = list(gm.graph.nodes)
        owner = dict(zip(nodes, unit_of, strict=False))
        aliases = Aliases(gm.graph)
        for node in nodes[-1].args[0]:
            saved.update((node.name, owner[one]) for one in aliases.of(node) if one in owner)
        return finish(gm.graph, owner, [])

    def backward(gm: fx.GraphModule, _: Any) -> Any:
        owner = {
            n: saved[n.name] for n in gm.graph.nodes if n.op == "placeholder" and n.name in saved
        }
        return finish(gm.graph, owner, [Gradient(n, unit, 0, n) for n, unit in enumerate(unit_of)])

    def function(*given: Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(names, given, strict=False)), given[-1])

    leaves = [parameter.requires_grad_() for parameter in parameters]
    how: dict[str, Any] = {"fw_compiler": forward, "bw_compiler": backward}
    how["partition_fn"] = getattr(partitioners, f"{partition}_partition")
    result = aot_function(function, **how)(*leaves, x)
    assert prefetch is None or world.is_empty()
    result.square().sum().backward()
    if prefetch is None:
        return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    assert world.is_empty()
    assert all(leaf.grad is None for leaf in leaves)
    taken = [world.gradients[unit, 0, number] for number, unit in enumerate(unit_of)]
    return [result.detach(), *(gradient for (gradient,) in taken)]
