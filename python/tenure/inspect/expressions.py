"""Expressions of the user's source: what they name, and what a line with them puts somewhere."""

from __future__ import annotations

import ast
from collections.abc import Sequence

__all__ = [
    "beginning",
    "called",
    "is_empty",
    "is_item_of",
    "is_little",
    "is_named",
    "puts_back",
    "puts_little",
    "targets",
    "unpacked",
]

_NUMBERS = {"bool", "float", "id", "int", "len", "repr", "str"}  # what these return holds no tensor
_NUMBERS_OF_TENSORS = {"item", "tolist"}
_WITHOUT_GRAPH = {"detach", "detach_", "numpy"}
_SAME = {"clone", "contiguous", "copy", "cpu", "items", "to", "values", *_WITHOUT_GRAPH}
_CONTAINERS = {"Counter", "OrderedDict", "defaultdict", "deque", "dict", "list", "set", "tuple"}


def puts_little(node: ast.AST, *, graph: bool) -> bool:
    """Whether all that a line puts somewhere are numbers, or have no graph."""
    if isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return bool(given) and all(is_little(value, graph=graph) for value in given)
    return isinstance(node, (ast.Assign, ast.AugAssign)) and is_little(node.value, graph=graph)


def puts_back(node: ast.AST, name: str) -> bool:
    """Whether a line leaves there no more than there was: ``outs = outs[-4:]``."""
    if not isinstance(node, ast.Assign) or not any(is_named(t, name) for t in targets(node)):
        return False
    return _is_part_of(node.value, name)


def _is_part_of(value: ast.expr, name: str) -> bool:
    """Whether this is some or all of what a name stands for, and without any more graph."""
    if isinstance(value, ast.Subscript):
        return _is_part_of(value.value, name)
    if isinstance(value, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        made = value.value if isinstance(value, ast.DictComp) else value.elt
        taken = [loop.target for loop in value.generators]
        own = all(_is_part_of(loop.iter, name) for loop in value.generators)
        each = {called(part) for target in taken for part in unpacked(target)}
        return own and any(_is_part_of(made, one) for one in each - {""})
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in _SAME and _is_part_of(value.func.value, name)
    if isinstance(value, ast.Call):
        one = len(value.args) == 1 and not value.keywords
        return one and called(value.func) in _CONTAINERS and _is_part_of(value.args[0], name)
    if isinstance(value, ast.Attribute) and value.attr == "data":
        return _is_part_of(value.value, name)
    return is_named(value, name)


def is_empty(value: ast.expr) -> bool:
    """``None``, ``[]`` and ``defaultdict(list)``: who sets this lets go."""
    if isinstance(value, (ast.List, ast.Set, ast.Tuple)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.values
    if isinstance(value, ast.Call) and called(value.func) in _CONTAINERS:
        return all(
            isinstance(arg, ast.Constant) or called(arg) in _CONTAINERS for arg in value.args
        )
    return isinstance(value, ast.Constant)


def is_little(value: ast.expr, *, graph: bool) -> bool:
    """Whether this is a number, a text, or has no graph where that is what matters."""
    if isinstance(value, (ast.Constant, ast.JoinedStr)) or called(value).isupper():
        return True  # a name in capitals is a constant's
    parts: Sequence[ast.expr | None] = ()
    if isinstance(value, (ast.Tuple, ast.List, ast.Set)):
        parts = value.elts
    elif isinstance(value, ast.Dict):
        parts = value.values
    elif isinstance(value, ast.IfExp):
        parts = (value.body, value.orelse)
    if parts:
        return all(part is not None and is_little(part, graph=graph) for part in parts)
    return isinstance(value, ast.Call) and _returns_little(value.func, graph=graph)


def _returns_little(function: ast.expr, *, graph: bool) -> bool:
    if isinstance(function, ast.Name):
        return function.id in _NUMBERS
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in _NUMBERS_OF_TENSORS or (graph and function.attr in _WITHOUT_GRAPH):
        return True
    # loss.detach().cpu()
    made = function.value
    return graph and isinstance(made, ast.Call) and _returns_little(made.func, graph=graph)


def beginning(node: ast.expr) -> str:
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.Assign) -> list[ast.expr]:
    """All that a line assigns to."""
    return [target for all_of in node.targets for target in unpacked(all_of)]


def unpacked(target: ast.expr) -> list[ast.expr]:
    """``a``, ``b`` and ``c`` of ``a, (b, *c) = …``."""
    if isinstance(target, ast.Starred):
        return unpacked(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return [one for element in target.elts for one in unpacked(element)]
    return [target]


def called(function: ast.AST) -> str:
    """The last name of ``a.b.c``; empty if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_named(node: ast.AST, name: str) -> bool:
    """Whether this is the variable or an attribute of that name."""
    return (isinstance(node, ast.Name) and node.id == name) or (
        isinstance(node, ast.Attribute) and node.attr == name
    )


def is_item_of(node: ast.AST, name: str) -> bool:
    """``name[…]``, also ``name[…][…]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
        if is_named(node, name):
            return True
    return False
