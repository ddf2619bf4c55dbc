"""The user's source: which lines of a file make a name refer to something, or to more."""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import site
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

from tenure.inspect.expressions import (
    beginning,
    called,
    is_empty,
    is_item_of,
    is_little,
    is_named,
    puts_back,
    puts_little,
    targets,
)

__all__ = [
    "is_library",
    "library_folders",
    "lines_that_add",
    "lines_that_call",
    "lines_that_chain",
    "lines_that_make",
    "lines_that_name",
    "lines_that_pass",
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
_TAKERS = ("cancel", "discard", "pop", "remove")  # what calls begin with that let go
_REGISTERS = ("add_module", "add_param_group", "register_")  # what such calls begin with
_NAMESPACES = {"globals", "locals", "vars"}
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
    aliases = _aliases(file, name)

    def adds(node: ast.AST) -> bool:
        is_alias = isinstance(node, ast.Call) and ast.unparse(node.func) in aliases
        return is_alias or _adds(node, name)

    def little(node: ast.AST) -> bool:
        return puts_little(node, graph=graph) or puts_back(node, name)

    return _lines(file, adds, little)


@functools.lru_cache(maxsize=256)
def lines_that_pass(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``collect(outs, out)``: a function of the program's fills what it is given."""
    foreign = _foreign(file)

    def passes(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or beginning(node.func) in foreign:
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        others = [value for value in given if not is_named(value, name)]
        return len(others) < len(given) and not all(is_little(v, graph=False) for v in others)

    return _lines(file, passes)


@functools.lru_cache(maxsize=256)
def lines_that_make(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``data = itertools.cycle(loader)``, for what fills itself."""

    def makes(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Assign)
            and any(is_named(target, name) for target in targets(node))
            and any(isinstance(value, ast.Call) for value in ast.walk(node.value))
        )

    return _lines(file, makes)


@functools.lru_cache(maxsize=256)
def lines_that_name(file: str) -> tuple[int, ...]:
    """Lines such as ``globals()[name] = out`` and ``self.__dict__[name] = out``."""

    def is_namespace(node: ast.AST) -> bool:
        made = isinstance(node, ast.Call) and called(node.func) in _NAMESPACES
        return made or called(node) == "__dict__"

    def names(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in _ADDERS and is_namespace(node.func.value)
        return isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Subscript) and is_namespace(target.value)
            for target in targets(node)
        )

    return _lines(file, names, lambda node: puts_little(node, graph=False))


@functools.lru_cache(maxsize=256)
def lines_that_chain(file: str) -> tuple[int, ...]:
    """Lines such as ``raise Retry() from last`` and ``error.__cause__ = last``."""

    def chains(node: ast.AST) -> bool:
        if isinstance(node, ast.Raise):
            return node.cause is not None and not isinstance(node.cause, ast.Constant)
        return isinstance(node, ast.Assign) and _sets(node, "__cause__")

    return _lines(file, chains)


@functools.lru_cache(maxsize=256)
def lines_that_call(file: str, name: str) -> tuple[int, ...]:
    """Lines such as ``stack.enter_context(…)``: all that are given to it are."""
    foreign = _foreign(file)
    return _lines(
        file,
        lambda node: (
            isinstance(node, ast.Call)
            and beginning(node.func)
            not in foreign  # torch.utils.data.DataLoader is not given to data
            and _is_given_to(node, name)
        ),
        lambda node: puts_little(node, graph=False),
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
        return ("hook" in called(node.func)) == hooks

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


def _foreign(file: str) -> set[str]:
    """Names of Python's own functions, of torch and of numpy, which keep nothing they are given."""
    return {
        *dir(builtins),
        *_names_from(file, "torch", made=False),
        *_names_from(file, "numpy", made=False),
    }


def _aliases(file: str, name: str) -> set[str]:
    """What ``outs.append`` is called: ``push = outs.append``."""
    return {
        ast.unparse(target)
        for node in _nodes(file)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in _ADDERS
        and (is_named(node.value.value, name) or is_item_of(node.value.value, name))
        for target in targets(node)
    }


def _names_from(file: str, package: str, *, made: bool = True) -> set[str]:
    """What a file calls a package, its parts, and what these have made, as ``log`` is a logger."""
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
        if made and isinstance(node.value, ast.Call) and beginning(node.value.func) in out:
            out |= {called(target) for target in targets(node)}
    return out - {""}


def _uses(call: ast.Call, names: Iterable[str]) -> bool:
    function = call.func
    owner = function.value if isinstance(function, ast.Attribute) else None
    known = beginning(function) in names or (owner is not None and called(owner) in names)
    return known and not puts_little(call, graph=False) and bool(call.args or call.keywords)


def _sets(node: ast.Assign, name: str) -> bool:
    if is_empty(node.value):
        return False
    return any(
        isinstance(target, ast.Attribute) and target.attr == name for target in targets(node)
    )


def _is_given_to(call: ast.Call, name: str) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and is_named(call.func.value, name)
        and bool(call.args or call.keywords)
        and not call.func.attr.startswith(_TAKERS)
        and not hasattr(nn.Module, call.func.attr)  # model.to(device) keeps nothing
    )


def _registers(function: ast.AST) -> bool:
    return called(function).startswith(_REGISTERS)


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        function = node.func
        if called(function) in _GIVEN_FIRST:
            return bool(node.args) and is_named(node.args[0], name)
        return (
            isinstance(function, ast.Attribute)
            and (function.attr in _ADDERS or _registers(function))
            and (is_named(function.value, name) or is_item_of(function.value, name))
        )
    if isinstance(node, ast.AugAssign):
        return is_named(node.target, name) or is_item_of(node.target, name)
    if isinstance(node, ast.Assign):
        if is_named(node.value, name) and not any(is_item_of(t, name) for t in targets(node)):
            return False  # self.optimizer = optimizer
        return any(
            is_item_of(target, name)
            or (is_named(target, name) and any(is_named(n, name) for n in ast.walk(node.value)))
            for target in targets(node)
        )
    return False
