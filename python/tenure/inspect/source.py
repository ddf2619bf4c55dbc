"""The user's source: which lines of a file make a name refer to something, or to more."""

from __future__ import annotations

import ast
import functools
import linecache
import site
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import nn

__all__ = [
    "is_library",
    "library_folders",
    "lines_that_add",
    "lines_that_call",
    "lines_that_register",
    "lines_that_set",
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


@functools.lru_cache(maxsize=256)
def lines_that_add(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``losses.append(loss)``, ``self.cache[key] = value``, ``total = total + x``."""
    return _lines(file, lambda node: _adds(node, name))


@functools.lru_cache(maxsize=256)
def lines_that_call(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``stack.enter_context(…)``: all that are given to it are."""
    return _lines(file, lambda node: isinstance(node, ast.Call) and _is_given_to(node, name))


@functools.lru_cache(maxsize=256)
def lines_that_set(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``ctx.out = out``."""
    return _lines(file, lambda node: isinstance(node, ast.Assign) and _sets(node, name))


@functools.lru_cache(maxsize=256)
def lines_that_register(file: str) -> tuple[int, ...]:
    """Lines such as ``self.add_module(name, layer)`` and ``register_hook(probe)``."""
    return _lines(file, lambda node: isinstance(node, ast.Call) and _registers(node.func))


def _lines(file: str, wanted: Callable[[ast.AST], bool]) -> tuple[int, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(sorted({getattr(node, "lineno", 0) for node in ast.walk(tree) if wanted(node)}))


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
    return isinstance(function, ast.Attribute) and function.attr.startswith(_REGISTERS)


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
