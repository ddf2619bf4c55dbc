"""Random graphs over sharded parameters, and a world that poisons what is released."""

from __future__ import annotations

import operator
import random
from typing import Any

import torch
from torch import Tensor, fx, nn

from tenure.sharding.compiled import Ops, Unit

aten: Any = torch.ops.aten
SEEDS_A_BLOCK = 100
SIDE = 4


class World:
    """The flat storages of units: full of NaN except between wait and release."""

    now: World

    def __init__(self, flats: dict[int, Tensor]) -> None:
        self.flats = flats
        self.full = {number: flat.clone() for number, flat in flats.items()}
        self.gradients: dict[tuple[int, int, int], list[Tensor]] = {}

    def fill(self, number: int) -> None:
        self.flats[number].copy_(self.full[number])

    def poison(self, number: int) -> None:
        self.flats[number].fill_(torch.nan)

    def enter(self, *, gathered: bool) -> None:
        World.now = self
        self.gradients = {}
        for number in self.flats:
            (self.fill if gathered else self.poison)(number)

    def holds(self, value: Tensor) -> bool:
        return place_of(value) in {place_of(flat) for flat in self.flats.values()}

    def is_empty(self) -> bool:
        return all(bool(flat.isnan().all()) for flat in self.flats.values())

    def reduce(self, gradient: Tensor, _model: int, *where: int) -> None:
        self.gradients.setdefault(where, []).append(gradient.clone())  # type: ignore[arg-type]


LIBRARY: Any = torch.library.Library("tenure_test_checker", "DEF")  # type: ignore[no-untyped-call]
for _name in ("gather", "wait", "release"):
    LIBRARY.define(f"{_name}(Tensor(a!)[] parameters, int model, int unit) -> ()")
LIBRARY.define("reduce(Tensor(a!) gradient, int model, int unit, int flat, int parameter) -> ()")
LIBRARY.define("same(Tensor x) -> Tensor")  # gives back what it gets, and does not say so
LIBRARY.define("pull_(Tensor(a!) x, Tensor y) -> ()")
for _name, _function in {
    "gather": lambda _parameters, _model, unit: World.now.poison(unit),
    "wait": lambda _parameters, _model, unit: World.now.fill(unit),
    "release": lambda _parameters, _model, unit: World.now.poison(unit),
    "reduce": lambda *arguments: World.now.reduce(*arguments),
    "same": lambda x: x,
    "pull_": lambda x, y: [x.copy_(y)][1:] or None,
}.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
test: Any = torch.ops.tenure_test_checker
OPS = Ops(test.gather.default, test.wait.default, test.release.default, test.reduce.default)
MOVES = (OPS.gather, OPS.wait, OPS.release)
INSERTED = (*MOVES, OPS.reduce)


def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def store(x: Tensor, y: Tensor) -> None:
    x.set_(y)  # type: ignore[call-overload]


def place_of(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def side(arg: Any, place: int) -> Any:
    """The nodes (0) or the values (1) of entries in arguments."""
    if isinstance(arg, tuple) and arg and isinstance(arg[0], fx.Node):
        return arg[place]
    if isinstance(arg, list | tuple):
        return type(arg)(side(one, place) for one in arg)
    if isinstance(arg, dict):
        return {name: side(one, place) for name, one in arg.items()}
    return arg


class Recorder(fx.Interpreter):
    """Runs a graph, and keeps a copy of every value that lies in no parameter."""

    def __init__(self, graph: fx.Graph, world: World) -> None:
        super().__init__(nn.Module(), garbage_collect_values=False, graph=graph)
        self.world = world
        self.values: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and not self.world.holds(value):
            self.values[n] = value.clone()
        return value


def all_of(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


class Case:
    """A random graph with its units, made by running it: what torch refuses is left out."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.graph = fx.Graph()
        self.pool: list[tuple[fx.Node, Tensor]] = []
        self.lists: list[tuple[fx.Node, Any]] = []
        self.inputs: list[Tensor] = []
        flats: dict[int, Any] = {}
        members: dict[int, list[fx.Node]] = {}
        for number in self.random.sample(range(10), self.random.randint(1, 4)):
            shapes = self.random.choices(
                [(4, 4), (2, 4), (4, 2), (4,)], k=self.random.randint(1, 3)
            )
            sizes = [torch.Size(shape).numel() for shape in shapes]
            flats[number] = torch.rand(sum(sizes), dtype=torch.float64)
            parts = flats[number].split(sizes)
            members[number] = [
                self.placeholder(part.view(shape))
                for part, shape in zip(parts, shapes, strict=True)
            ]
            if self.random.random() < 0.2:  # tied: one parameter, two placeholders
                members[number].append(self.placeholder(parts[0].view(shapes[0])))
        for _ in range(2):
            self.placeholder(torch.rand(SIDE, SIDE, dtype=torch.float64))
        self.world = World(flats)
        self.loose = {place_of(flat) for flat in flats.values()}
        self.units = [
            Unit(number, tuple(nodes), 8 * flats[number].numel())
            for number, nodes in members.items()
        ]
        for _ in range(self.random.randint(8, 30)):
            self.random.choices(
                [self.view, self.lists_of, self.compute, self.in_place, self.odd], [5, 2, 6, 3, 2]
            )[0]()
        chosen = self.random.choices(self.pool, k=3) + self.pool[-2:]
        self.graph.output(tuple(node for node, _ in chosen))

    def placeholder(self, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"in_{len(self.inputs)}")
        self.inputs.append(value)
        self.pool.append((node, value))
        return node

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> bool:
        """Adds a call on pool entries and plain values, unless torch refuses it."""
        try:
            value = target(*side(args, 1), **side(kwargs, 1))
        except (RuntimeError, IndexError, ValueError):
            return False
        node = self.graph.call_function(target, side(args, 0), side(kwargs, 0))
        if self.seed % 2:
            node.meta["val"] = value
        if isinstance(value, Tensor) and value.numel():
            self.pool.append((node, value))
        elif isinstance(value, list | tuple):
            self.lists.append((node, value))
        return True

    def any(self) -> Any:
        return self.random.choice(self.pool)

    def temporary(self) -> Any:
        """A value that cannot lie in a parameter, by all that schemas say."""
        if all(place_of(value) in self.loose for _, value in self.pool):
            self.emit(aten.sin.default, self.any())
        return self.random.choice([one for one in self.pool if place_of(one[1]) not in self.loose])

    def view(self) -> None:
        x = self.any()
        calls: list[tuple[Any, ...]] = [
            (aten.t.default, x),
            (aten.view.default, x, [-1]),
            (aten.view.default, x, [2, -1]),
            (aten.slice.Tensor, x, 0, 1, 3),
            (aten.select.int, x, 0, self.random.randint(0, 1)),
            (aten.expand.default, x, [2, *x[1].shape]),
            (aten.as_strided.default, x, [2, 2], [1, 2]),
            (aten.unsqueeze.default, x, 0),
            (aten.permute.default, x, list(reversed(range(x[1].dim())))),
            (aten.detach.default, x),
            (aten._unsafe_view.default, x, [-1]),
        ]
        self.emit(*self.random.choice(calls))

    def lists_of(self) -> None:
        if self.lists and self.random.random() < 0.6:
            made = self.random.choice(self.lists)
            self.emit(operator.getitem, made, self.random.randrange(len(made[1])))
            return
        calls = [
            (aten.split.Tensor, 2),
            (aten.chunk.default, 2),
            (aten.unbind.int,),
            (aten.split_with_sizes.default, [1, 3]),
            (aten.tensor_split.sections, 3),
            (aten.aminmax.default,),
        ]
        target, *rest = self.random.choice(calls)
        self.emit(target, self.any(), *rest)

    def compute(self) -> None:
        kind = self.random.randrange(4)
        if kind == 0:
            self.emit(self.random.choice([aten.sin.default, aten.tanh.default]), self.any())
        elif kind == 1:
            op = self.random.choice([aten.add.Tensor, aten.maximum.default, aten.atan2.default])
            self.emit(op, self.any(), self.any())
        elif kind == 2 and self.emit(aten.mm.default, self.any(), self.any()):
            self.emit(aten.tanh_.default, self.pool[-1])
        else:
            self.emit(aten.cat.default, [self.any(), self.any()])

    def in_place(self) -> None:
        kind = self.random.randrange(4)
        if kind == 0:
            self.emit(aten.add_.Tensor, self.temporary(), self.any())
        elif kind == 1:
            self.emit(aten.copy_.default, self.temporary(), self.any())
        else:
            x, out = self.any(), self.temporary()
            if x[1].shape == out[1].shape:
                self.emit(aten.sin.out, x, out=out)

    def odd(self) -> None:
        """What only sometimes is a view, has no schema, or has one that says nothing."""
        x = self.any()
        y = self.any()
        calls: list[tuple[Any, ...]] = [
            (aten.reshape.default, x, [-1]),
            (aten.contiguous.default, x),
            (aten.to.dtype, x, torch.float64),
            (aten.dropout.default, x, 0.5, False),
            (aten.zeros_like.default, x),
            (pair, x, y),
            (test.same.default, x),
        ]
        call = self.random.choice(calls)
        before = len(self.pool)
        if self.emit(*call) and {place_of(x[1]), place_of(y[1])} & self.loose:
            made = [x, y] if call[0] is pair else self.pool[before:]
            self.loose |= {place_of(value) for _, value in made}

    def pick(self, *targets: Any) -> fx.Node:
        return self.random.choice(all_of(self.graph, *targets))

    def run(self, *, gathered: bool) -> tuple[dict[fx.Node, Tensor], list[Any]]:
        self.world.enter(gathered=gathered)
        known = {id(value) for _, value in self.pool if self.world.holds(value)}
        inputs = [one if id(one) in known else one.clone() for one in self.inputs]
        recorder = Recorder(self.graph, self.world)
        outputs = recorder.run(*inputs)
        return recorder.values, [
            None if one is None or self.world.holds(one) else one.clone() for one in outputs
        ]


# Breakages, each of which makes a proven graph wrong.
