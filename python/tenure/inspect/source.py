"""The user's source: which lines of a file put something into a container of a given name."""

from __future__ import annotations

import ast
import functools
import linecache
import site
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["is_library", "library_folders", "lines_that_add"]

_ADDERS = {
    "add",
    "add_module",
    "append",
    "appendleft",
    "extend",
    "insert",
    "put",
    "put_nowait",
    "register_buffer",
    "register_forward_hook",
    "register_full_backward_hook",
    "register_hook",
    "register_module",
    "setdefault",
    "update",
}


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
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(
        sorted({node.lineno for node in ast.walk(tree) if _adds(node, name)})  # type: ignore[attr-defined]
    )


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        function = node.func
        return (
            isinstance(function, ast.Attribute)
            and function.attr in _ADDERS
            and (_is_named(function.value, name) or _is_item_of(function.value, name))
        )
    if isinstance(node, ast.AugAssign):
        return _is_named(node.target, name) or _is_item_of(node.target, name)
    if isinstance(node, ast.Assign):
        return any(
            _is_item_of(target, name)
            or (_is_named(target, name) and any(_is_named(n, name) for n in ast.walk(node.value)))
            for target in node.targets
        )
    return False


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
