"""What becomes of a graph of Dynamo on its way to a compiler.

Note [What the compiler sees]
`model.parameters()` gives pieces, for that is what modules have registered. A module's attribute is
the whole parameter, and the attribute is what a forward reads: so that is what Dynamo makes an
input of the graph, with its true shape and a storage that has no memory then. AOTAutograd saves
it, or views of it, for backward as it would any parameter, and the gather for backward refills the
same storage. The hooks that gather for eager modules do nothing while a module is compiled;
operators in the graph do it instead. Gradients of parameters go from the graph to `tenure::reduce`
and leave it as None, so that autograd has nothing to accumulate.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from tenure.errors import InputError
from tenure.sharding.compiled.aliases import Aliases
from tenure.sharding.compiled.checker import prove
from tenure.sharding.compiled.schedule import (
    Gradient,
    Ops,
    Unit,
    gather_throughout,
    peak,
    schedule,
)
from tenure.sharding.identity import Identity, identity_of
from tenure.sharding.sharded import Compiled, Sharded

__all__ = ["OPS", "Compiler", "Prepare", "Preparing"]

_log = logging.getLogger("tenure.sharding")

Compiler = Callable[..., Any]
OPS = Ops(
    torch.ops.tenure.gather.default,
    torch.ops.tenure.wait.default,
    torch.ops.tenure.release.default,
    torch.ops.tenure.reduce.default,
)


class Prepare(Protocol):
    """Has a graph gather, release and reduce what it uses of a sharded model."""

    def __call__(self, given: fx.Graph, graph: fx.Graph, *, is_backward: bool) -> None:
        """Changes a graph in place.

        Args:
            given: The graph as AOTAutograd made it, with its names.
            graph: The same, or what a compiler has made of it.
            is_backward: Which of the two it is.
        """


@dataclass
class Preparing:
    """A graph of Dynamo, which becomes a forward and perhaps a backward."""

    model: Callable[[], Sharded | None]  # compiled functions outlive it
    parameters: dict[int, Identity]  # by position among the inputs
    shapes: dict[int, torch.Size]  # likewise
    trained: frozenset[int]  # likewise
    attributes: int  # inputs that Dynamo has put into the module, which come first
    limit: int | None
    _saved: dict[str, Identity] = field(default_factory=dict)  # by name, what backward may be given

    def prepare(self, given: fx.Graph, graph: fx.Graph, *, is_backward: bool) -> None:
        """As `Prepare` says."""
        if is_backward:
            kind, parameters, gradients = (
                "backward",
                self._of_backward(given, graph),
                self._gradients(),
            )
        else:
            self._learn(given)
            kind, parameters, gradients = "forward", self._of_forward(graph), []
        nodes: dict[int, list[fx.Node]] = {}
        for node, identity in parameters.items():
            nodes.setdefault(identity.unit, []).append(node)
        model = self._living()
        sizes = [unit.bytes for unit in model.stats().units]
        units = [Unit(unit, tuple(found), sizes[unit]) for unit, found in nodes.items()]
        why = self._schedule(graph, units, gradients)
        _mark_last(graph)
        model.graphs.append(Compiled(kind, peak(graph, units, OPS), tuple(why)))
        for reason in why[:1]:
            _log.warning("a %s graph has all its units gathered while it runs: %s", kind, reason)

    def watched(self, run: Compiler) -> Compiler:
        """The compiled function, told of as a pass of the model, and its backward too."""
        gives = Counter(self.parameters[at].unit for at in self.trained)

        def begin_backward(_gradients: Any) -> None:
            model = self._living()
            model.backward_runs()
            for unit, gradients in gives.items():
                model.hand_over(unit, gradients)

        called = {
            at - self.attributes: one
            for at, one in self.parameters.items()
            if at >= self.attributes
        }

        def call(*args: Any) -> Any:
            if any(identity_of(args[at]) is not one for at, one in called.items()):
                raise InputError(
                    "this graph was compiled for other parameters, and Dynamo did not notice: "
                    "do not compile what several units share"
                )
            with self._living().passing():
                outputs = run(*args)
            for node in {one.grad_fn for one in outputs if isinstance(one, torch.Tensor)}:
                if node is not None:
                    node.register_prehook(begin_backward)
            return outputs

        return call

    def _living(self) -> Sharded:
        model = self.model()
        if model is None:
            raise InputError("the sharded model that this was compiled for is gone")
        return model

    def _of_forward(self, graph: fx.Graph) -> dict[fx.Node, Identity]:
        inputs = _inputs(graph)
        for at, shape in self.shapes.items():
            found = inputs[at].meta["val"].shape if at < len(inputs) else None
            if found != shape:
                raise InputError(
                    "the compiler has put other inputs in the place of parameters, "
                    "so they cannot be told from the rest: this graph cannot be compiled"
                )
        return {inputs[at]: identity for at, identity in self.parameters.items()}

    def _of_backward(self, given: fx.Graph, graph: fx.Graph) -> dict[fx.Node, Identity]:
        both = zip(_inputs(given), _inputs(graph), strict=True)
        return {node: self._saved[known.name] for known, node in both if known.name in self._saved}

    def _gradients(self) -> list[Gradient]:
        """A backward returns the gradients of all inputs of its forward, in their order."""
        return [
            Gradient(at, identity.unit, identity.flat, identity.index)
            for at, identity in self.parameters.items()
            if at in self.trained
        ]

    def _learn(self, forward: fx.Graph) -> None:
        """What of the parameters a backward may be given, under the name that it has there."""
        self._refuse_writes()
        parameters = self._of_forward(forward)
        aliases = Aliases(forward)
        for node in forward.nodes:
            found = [parameters[origin] for origin in aliases.of(node) if origin in parameters]
            if len({identity.unit for identity in found}) > 1 and node.op != "output":
                raise InputError(
                    f"{node} may be a view of parameters of several units, so what calls "
                    f"{node.target} cannot be compiled: make one unit of them"
                )
            if found:
                self._saved[node.name] = found[0]

    def _refuse_writes(self) -> None:
        """AOTAutograd takes writes to inputs out of the graph and does them after it."""
        context = torch._guards.TracingContext.try_get()
        about = context.fw_metadata.input_info if context and context.fw_metadata else []
        if any(at < len(about) and about[at].mutates_data for at in self.parameters):
            raise InputError(
                "the graph writes to a parameter: a sharded one is only read; "
                "write to the pieces that model.parameters() gives"
            )

    def _schedule(self, graph: fx.Graph, units: list[Unit], gradients: list[Gradient]) -> list[str]:
        """Returns why not, if the finished graph could not be proven."""
        model = self._living()
        end = next(iter(graph.find_nodes(op="output")))
        outputs = end.args
        schedule(
            graph,
            units,
            OPS,
            model=model.number,
            prefetch=model.ahead.units,
            limit=self.limit,
            gradients=gradients,
        )
        why = prove(graph, units, OPS)
        if why:
            for node in list(graph.nodes):
                if node.op == "call_function" and node.target in vars(OPS).values():
                    graph.erase_node(node)
            end.args = outputs
            gather_throughout(graph, units, OPS, model=model.number, gradients=gradients)
        return why


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _mark_last(graph: fx.Graph) -> None:
    """With the last gradient of a unit its sum begins."""
    seen = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.target is OPS.reduce:
            unit = node.args[2]
            node.args = (*node.args, unit not in seen)
            seen.add(unit)
