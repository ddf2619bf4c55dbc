"""In whose storage the value of a node may lie, and whose memory a node may touch.

An origin is a node that brings a storage into the graph: a placeholder, or an op that allocates.
A value has several when it is a list, or when it is not known in which of them it lies.

Note [What a schema is believed]
Schemas of aten and prims are believed, with two exceptions: an op that torch implements by other
ops (CompositeImplicitAutograd) may hand back its input without saying so, like dropout in
evaluation, and so may the few in `_UNSAID`. Any other op, and whatever has no schema, may return,
and touches, all that it gets. What it writes is believed, as functionalization does already.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["Aliases", "Effect", "effect_of"]

_BELIEVED = {"aten", "prims"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They compute sizes, strides and an offset, and touch no memory of what they look at. What only
# sometimes is a view (reshape, contiguous, to) is not here.
_VIEWS = {
    "aten": _words("""
        H T _conj _neg_view _reshape_alias _unsafe_view adjoint alias as_strided chunk conj detach
        diagonal dsplit expand expand_as hsplit imag lift_fresh mH mT matrix_H movedim moveaxis
        narrow numpy_T permute real select slice split split_with_sizes squeeze swapaxes swapdims t
        tensor_split transpose unbind unflatten unfold unsafe_chunk unsafe_split
        unsafe_split_with_sizes unsqueeze view view_as view_as_complex view_as_real vsplit
    """),
    "prims": _words("""
        as_strided broadcast_in_dim collapse_view conj slice slice_in_dim split_dim squeeze
        transpose view_of view_of_dtype
    """),
}

# They ask for the shape, dtype or place of their first argument only.
_SHAPES = {
    "aten": _words("""
        _assert_tensor_metadata dim empty_like full_like is_same_size new_empty new_empty_strided
        new_full new_ones new_zeros numel ones_like rand_like randn_like size storage_offset stride
        sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride zeros_like
    """),
    "prims": _words("device empty_like full_like"),
}

# Their results may lie in what they get, and their schemas do not say so.
_UNSAID = _words(
    "_lazy_clone _unsafe_view data device_put lift unsafe_chunk unsafe_split"
    " unsafe_split_with_sizes"
)

# Afterwards the tensor that they write lies in the storage of another one.
_MOVING = {"set_", "set_data"}

_PLAIN = re.compile(
    r"(?:(?:Optional|List)\[)*"
    r"(?:int|float|bool|complex|number|str|Device|Generator|Stream|AnyEnumType)\]*"
)

_IN_PLACE = _words(
    "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
    " setitem delitem"
)


@dataclass(frozen=True)
class Effect:
    """What a node does with the nodes that it is given.

    Attributes:
        returned: Its value, or an element of it, may lie in the storage of these.
        touched: It may read or write the memory of these.
        written: It may write the memory of these, or change where they lie.
        moved: These may lie in the storage of any touched one afterwards.
    """

    returned: tuple[fx.Node, ...] = ()
    touched: tuple[fx.Node, ...] = ()
    written: tuple[fx.Node, ...] = ()
    moved: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class _Argument:
    name: str
    place: int
    returned: bool
    touched: bool
    written: bool


@dataclass(frozen=True)
class _Signature:
    arguments: tuple[_Argument, ...]  # those that may hold a tensor
    moves: bool
    several: bool  # returns a list or a tuple


def effect_of(node: fx.Node) -> Effect:
    """What a node does with its arguments, by its schema; all that is possible without one."""
    if node.op in ("placeholder", "get_attr", "output"):
        return Effect()
    target: Any = node.target
    if target is operator.getitem and _is_several(node.args[0]):
        return Effect(returned=tuple(nodes_in(node.args[0])))
    if isinstance(target, OpOverload):
        return _effect_of_op(node, _signature_of(target))
    every = tuple(node.all_input_nodes)
    if isinstance(target, HigherOrderOperator):
        mutates = "mutation" in str(target)  # of a Triton kernel: which ones is not in the graph
        return Effect(returned=every, touched=every, written=every if mutates else ())
    first = tuple(nodes_in(node.args[:1])) if _writes_by_name(node) else ()
    return Effect(returned=every, touched=every, written=first, moved=every)


def nodes_in(argument: Any) -> list[fx.Node]:
    """All nodes of an argument, in lists and dicts too."""
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


class Aliases:
    """The storages of all values of a graph, found by one walk in the order of execution."""

    def __init__(self, graph: fx.Graph) -> None:
        """Walks over the graph once; what changes in it later is not seen."""
        # For each value its origins; for each origin what else its tensors came to lie in.
        self._origins: dict[fx.Node, frozenset[fx.Node]] = {}
        self._held: dict[fx.Node, set[fx.Node]] = {}
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self._writes: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in graph.nodes:
            effect = effect_of(node)
            self._reads[node] = self._all_of(effect.touched)
            self._writes[node] = self._all_of(effect.written)
            for moved in effect.moved:
                for origin in self._origins[moved]:
                    self._held[origin] |= self._reads[node]
            own = frozenset[fx.Node]().union(*(self._origins[one] for one in effect.returned))
            if effect.touched or not effect.returned:
                own |= {node}
                self._held[node] = {node}
            self._origins[node] = own

    def of(self, node: fx.Node) -> frozenset[fx.Node]:
        """The origins of a value, once the whole graph has run."""
        return self._all_of((node,))

    def reads(self, node: fx.Node) -> frozenset[fx.Node]:
        """The origins whose memory a node may touch when it runs, by a read or by a write.

        The output of the graph touches none: it hands on.
        """
        return self._reads[node]

    def writes(self, node: fx.Node) -> frozenset[fx.Node]:
        """The origins whose memory a node may write when it runs."""
        return self._writes[node]

    def _all_of(self, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
        origins = {origin for node in nodes for origin in self._origins[node]}
        return frozenset[fx.Node]().union(*(self._held[origin] for origin in origins))


def _effect_of_op(node: fx.Node, signature: _Signature) -> Effect:
    returned: list[fx.Node] = []
    touched: list[fx.Node] = []
    written: list[fx.Node] = []
    for argument in signature.arguments:
        if argument.place < len(node.args):
            given = nodes_in(node.args[argument.place])
        else:
            given = nodes_in(node.kwargs.get(argument.name))
        returned += given if argument.returned else ()
        touched += given if argument.touched else ()
        written += given if argument.written else ()
    moved = written if signature.moves else ()
    return Effect(tuple(returned), tuple(touched), tuple(written), tuple(moved))


@functools.cache
def _signature_of(op: OpOverload[..., Any]) -> _Signature:
    schema = op._schema
    space, _, name = schema.name.partition("::")
    looks = {*_VIEWS.get(space, ()), *_SHAPES.get(space, ())}
    unsaid = space not in _BELIEVED or name in _UNSAID or _is_composite_unsaid(op)
    results = [result for result in schema.returns if _may_hold_tensor(result)]
    arguments = []
    for place, argument in enumerate(schema.arguments):
        if not _may_hold_tensor(argument):
            continue
        said = any(_overlap(argument, result) for result in results)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        arguments.append(
            _Argument(
                argument.name,
                place,
                returned=said or (unsaid and bool(results)),
                touched=writes or place > 0 or name not in looks,
                written=writes,
            )
        )
    several = len(schema.returns) > 1 or "List" in "".join(str(one.type) for one in schema.returns)
    return _Signature(tuple(arguments), space not in _BELIEVED or name in _MOVING, several)


def _is_composite_unsaid(op: OpOverload[..., Any]) -> bool:
    if any(result.alias_info is not None for result in op._schema.returns):
        return False
    name = f"{op._schema.name}.{op._schema.overload_name}".rstrip(".")
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _overlap(argument: torch.Argument, result: torch.Argument) -> bool:
    if argument.alias_info is None or result.alias_info is None:
        return False
    ours, theirs = argument.alias_info.before_set, result.alias_info.before_set
    # torch keeps no letters for a list, and marks what goes into one with a star.
    return not ours or not theirs or "*" in argument.alias_info.after_set or bool(ours & theirs)


def _may_hold_tensor(argument: torch.Argument) -> bool:
    return _PLAIN.fullmatch(str(argument.type)) is None


def _is_several(argument: Any) -> bool:
    if not isinstance(argument, fx.Node):
        return True
    if isinstance(argument.target, OpOverload):
        return _signature_of(argument.target).several
    return isinstance(argument.target, HigherOrderOperator)


def _writes_by_name(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op != "call_module" and (in_place or name in _IN_PLACE)
