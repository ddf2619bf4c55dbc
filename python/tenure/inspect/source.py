"""The user's source: which lines of a file make a name refer to something, or to more."""

from __future__ import annotations

import ast
import functools
import linecache
import site
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import nn

__all__ = [
    "is_library",
    "library_folders",
    "lines_that_add",
    "lines_that_call",
    "lines_that_register",
    "lines_that_set",
    "lines_that_use",
    "package_of",
]

_ADDERS = {
    "add",
    "append",
    "appendleft",
    "extend",
    "insert",
    "put",
    "put_nowait",
    "set",
    "setdefault",
    "update",
}
_GIVEN_FIRST = {"heappush", "insort", "insort_left", "insort_right", "setattr"}
_REGISTERS = ("add_module", "add_param_group", "register_")  # what such calls begin with
_NUMBERS = {"bool", "float", "id", "int", "len", "repr", "str"}  # what these return holds no tensor
_NUMBERS_OF_TENSORS = {"item", "tolist"}
_WITHOUT_GRAPH = {"detach", "detach_", "numpy"}
_REPEATED = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    *(ast.For, ast.AsyncFor, ast.While),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


@functools.cache
def library_folders() -> tuple[str, ...]:
    """What the files begin with whose code is not the user's."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if hasattr(site, "getsitepackages"):  # not in every kind of environment
        folders.update(site.getsitepackages())
    folders.add(str(Path(__file__).resolve().parents[1]))
    made = ("<eval_with_key>", f"{tempfile.gettempdir()}/torchinductor_")  # by torch.compile
    return (*sorted(f"{folder}/" for folder in folders), *made)


def is_library(file: str) -> bool:
    """Whether a source file is not the user's."""
    return not file or file.startswith(library_folders())


def package_of(file: str) -> str:
    """What a library's file is imported as, to the first dot."""
    folders = [folder for folder in library_folders() if file.startswith(folder)]
    parts = Path(file[len(max(folders, key=len)) :]).parts if folders else ()
    return parts[0].removesuffix(".py") if parts else ""


@functools.lru_cache(maxsize=256)
def lines_that_add(file: str, name: str, *, graph: bool = False) -> tuple[int, ...]:
    """Lines such as ``losses.append(loss)``, ``self.cache[key] = value``, ``total = total + x``.

    Args:
        file: The source file.
        name: The variable or attribute.
        graph: Whether what it holds is held through a graph, which a detached tensor has not.
    """
    return _lines(
        file, lambda node: _adds(node, name), lambda node: _puts_little(node, graph=graph)
    )


@functools.lru_cache(maxsize=256)
def lines_that_call(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``stack.enter_context(…)``: all that are given to it are."""
    return _lines(
        file,
        lambda node: isinstance(node, ast.Call) and _is_given_to(node, name),
        lambda node: _puts_little(node, graph=False),
    )


@functools.lru_cache(maxsize=256)
def lines_that_use(file: str, package: str) -> tuple[int, ...]:
    """Lines such as ``weakref.finalize(job, note, out)``, and ``log.debug("%s", out)``.

    Those that give a package's functions, or what these have made, more than constants.
    """
    names = _names_from(file, package)
    return _lines(file, lambda node: isinstance(node, ast.Call) and _uses(node, names))


@functools.lru_cache(maxsize=256)
def lines_that_set(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``ctx.out = out``."""
    return _lines(file, lambda node: isinstance(node, ast.Assign) and _sets(node, name))


@functools.lru_cache(maxsize=256)
def lines_that_register(file: str, *, hooks: bool) -> tuple[int, ...]:
    """Lines such as ``register_hook(probe)``, or else such as ``self.add_module(name, layer)``."""

    def registers(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not _registers(node.func):
            return False
        return ("hook" in _called(node.func)) == hooks

    return _lines(file, registers)


def _nodes(file: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError, RecursionError):
        return []


def _lines(
    file: str,
    wanted: Callable[[ast.AST], bool],
    little: Callable[[ast.AST], bool] = lambda _: False,
) -> tuple[int, ...]:
    """The lines that are wanted, without those that are less likely if there are others."""
    nodes = _nodes(file)
    found = [node for node in nodes if wanted(node)]
    found = [node for node in found if not little(node)] or found
    if len(found) > 1:  # what runs once keeps one thing
        again = {id(n) for outer in nodes if isinstance(outer, _REPEATED) for n in ast.walk(outer)}
        found = [node for node in found if id(node) in again] or found
    return tuple(sorted({getattr(node, "lineno", 0) for node in found}))


def _puts_little(node: ast.AST, *, graph: bool) -> bool:
    """Whether all that a line puts somewhere are numbers, or have no graph."""
    if isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return bool(given) and all(_is_little(value, graph=graph) for value in given)
    return isinstance(node, (ast.Assign, ast.AugAssign)) and _is_little(node.value, graph=graph)


def _is_little(value: ast.expr, *, graph: bool) -> bool:
    if isinstance(value, (ast.Constant, ast.JoinedStr)) or _called(value).isupper():
        return True  # a name in capitals is a constant's
    parts: Sequence[ast.expr | None] = ()
    if isinstance(value, (ast.Tuple, ast.List, ast.Set)):
        parts = value.elts
    elif isinstance(value, ast.Dict):
        parts = value.values
    elif isinstance(value, ast.IfExp):
        parts = (value.body, value.orelse)
    if parts:
        return all(part is not None and _is_little(part, graph=graph) for part in parts)
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


def _names_from(file: str, package: str) -> set[str]:
    """What a file calls a package, its parts, and what these return, as ``log`` is a logger."""
    out: set[str] = set()
    nodes = _nodes(file)
    for node in nodes:
        if isinstance(node, ast.Import):
            parts = [alias for alias in node.names if alias.name.partition(".")[0] == package]
            out |= {alias.asname or package for alias in parts}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            out |= {alias.asname or alias.name for alias in node.names}
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    for node in assigned:
        if isinstance(node.value, ast.Call) and _beginning(node.value.func) in out:
            out |= {_called(target) for target in _targets(node)}
    return out - {""}


def _beginning(node: ast.expr) -> str:
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _uses(call: ast.Call, names: Iterable[str]) -> bool:
    function = call.func
    owner = function.value if isinstance(function, ast.Attribute) else None
    known = _beginning(function) in names or (owner is not None and _called(owner) in names)
    return known and not _puts_little(call, graph=False) and bool(call.args or call.keywords)


def _sets(node: ast.Assign, name: str) -> bool:
    if isinstance(node.value, ast.Constant):  # None, which lets go
        return False
    return any(
        isinstance(target, ast.Attribute) and target.attr == name for target in _targets(node)
    )


def _targets(node: ast.Assign) -> list[ast.expr]:
    return [target for all_of in node.targets for target in _unpacked(all_of)]


def _unpacked(target: ast.expr) -> list[ast.expr]:
    """``a``, ``b`` and ``c`` of ``a, (b, *c) = …``."""
    if isinstance(target, ast.Starred):
        return _unpacked(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return [one for element in target.elts for one in _unpacked(element)]
    return [target]


def _is_given_to(call: ast.Call, name: str) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and _is_named(call.func.value, name)
        and bool(call.args or call.keywords)
        and not hasattr(nn.Module, call.func.attr)  # model.to(device) keeps nothing
    )


def _registers(function: ast.AST) -> bool:
    return _called(function).startswith(_REGISTERS)


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        function = node.func
        if _called(function) in _GIVEN_FIRST:
            return bool(node.args) and _is_named(node.args[0], name)
        return (
            isinstance(function, ast.Attribute)
            and (function.attr in _ADDERS or _registers(function))
            and (_is_named(function.value, name) or _is_item_of(function.value, name))
        )
    if isinstance(node, ast.AugAssign):
        return _is_named(node.target, name) or _is_item_of(node.target, name)
    if isinstance(node, ast.Assign):
        if _is_named(node.value, name) and not any(_is_item_of(t, name) for t in _targets(node)):
            return False  # self.optimizer = optimizer
        return any(
            _is_item_of(target, name)
            or (_is_named(target, name) and any(_is_named(n, name) for n in ast.walk(node.value)))
            for target in _targets(node)
        )
    return False


def _called(function: ast.AST) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_named(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (
        isinstance(node, ast.Attribute) and node.attr == name
    )


def _is_item_of(node: ast.AST, name: str) -> bool:
    """``name[…]``, also ``name[…][…]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
        if _is_named(node, name):
            return True
    return False
