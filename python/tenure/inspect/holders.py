"""Retention paths in words: from a root of the process to a storage.

The extension finds the path (``_C.References``); this says what each reference is. It never shows
the contents of strings, keys of plain dicts or values: names of variables, attributes, classes and
functions only.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tenure import _C
from tenure.inspect.hops import Hop, add_lines, add_lines_of_cycle, collapsed, path_text

__all__ = [
    "Hop",
    "add_lines",
    "add_lines_of_cycle",
    "collapsed",
    "own_objects",
    "path_text",
    "retention_path",
]

Element = tuple[str, Any, str, str]  # kind, object or None, text, name of the next one in it


def retention_path(elements: Sequence[Element]) -> list[Hop]:
    """The elements of a path, root first, as hops that a person reads."""
    hops: list[Hop] = []
    at = 0
    while at < len(elements):
        used, hop = _hop(elements, at)
        if hop is not None:
            hop.elements = list(range(at, at + used))
            hop.target = at + used
            hops.append(hop)
        elif hops:
            hops[-1].elements.extend(range(at, at + used))
        at += used
    return hops


def _hop(elements: Sequence[Element], at: int) -> tuple[int, Hop | None]:
    """How many elements the next hop stands for, and the hop unless it says nothing new."""
    kind, shown, text, edge = elements[at]
    following = elements[at + 1] if at + 1 < len(elements) else None
    if kind == "frame":
        if following is not None and _is_namespace(following[1]) and at + 2 < len(elements):
            return 2, _global(following[1], _value(elements, at + 2))  # runpy's, or a notebook's
        file, _ = shown
        name = f"{edge} (local of {text})" if edge else f"a value in use by {text}"
        return 1, Hop("local", name, edge, file)
    if kind == "root":
        return _root(elements, at)
    if kind == "autograd":
        return _graph(elements, at)
    if kind == "storage":
        return 1, None
    if kind == "tensor":
        return 1, _out_of_tensor(elements, at)
    assert kind == "object"
    if following is None:
        return 1, Hop("object", _type_name(shown))
    return _out_of_object(elements, at)


def _root(elements: Sequence[Element], at: int) -> tuple[int, Hop | None]:
    _, shown, text, _ = elements[at]
    if text == "modules" and at + 1 < len(elements):
        module = elements[at + 1][1]
        name = _key_of(shown, module)
        if isinstance(module, types.ModuleType) and at + 2 < len(elements):
            # sys.modules → module → its dict → the variable
            used = 3 if elements[at + 2][1] is vars(module) else 2
            return used, _global(vars(module), _value(elements, at + used), name)
        return 1, Hop("module", str(name))
    if text == "context variables":
        return _out_of_context(elements, at)
    return 1, Hop("root", text)


def _out_of_context(elements: Sequence[Element], at: int) -> tuple[int, Hop]:
    """A context keeps its variables in a tree of its own."""
    end = at + 1
    while end < len(elements) and type(elements[end][1]).__name__.startswith("hamt"):
        end += 1
    target = _value(elements, end)
    found = next((v.name for v, held in elements[at][1].items() if held is target), "?")
    return end - at, Hop("context", f"{found} (context variable)", found)


def _is_namespace(owner: Any) -> bool:
    """Whether a dict is where some code has its global variables: its keys are names."""
    return type(owner) is dict and "__builtins__" in owner and "__name__" in owner


def _global(namespace: dict[str, Any], target: Any, module: str | None = None) -> Hop:
    variable = _key_of(namespace, target) or ""
    file = namespace.get("__file__")
    file = file if isinstance(file, str) else ""
    where = module or namespace.get("__name__")
    if where in {"__main__", None} or not isinstance(where, str):
        where = Path(file).name or "__main__"
    return Hop("global", f"{variable or '?'} (global of {where})", variable, file)


def _graph(elements: Sequence[Element], at: int) -> tuple[int, Hop]:
    end = at
    while end < len(elements) and elements[end][0] == "autograd":
        end += 1
    last = elements[end - 1]
    nodes = end - at
    what = last[2].removeprefix("torch::autograd::")
    if end < len(elements):
        kind, shown, _, _ = elements[end]
        if kind in {"tensor", "storage"}:
            what += " variable" if what == "AccumulateGrad" else f" saved {last[3]}".rstrip()
        elif kind == "object" and isinstance(shown, torch.autograd.function.BackwardCFunction):
            what = f"{type(shown).__name__.removesuffix('Backward')} ctx"
        elif kind == "object" and isinstance(shown, dict):
            what += " hook"
        elif kind == "object":
            saved = f" saved {last[3]}".rstrip()
            by = "" if isinstance(shown, _C.OffloadSaved) else ", packed by saved_tensors_hooks"
            what += saved + by
    size = f"graph ({nodes} nodes) → " if nodes > 1 else "graph → "
    return nodes, Hop("graph", size + what)


def _out_of_tensor(elements: Sequence[Element], at: int) -> Hop | None:
    following = elements[at + 1] if at + 1 < len(elements) else None
    if following is None or following[0] == "storage":
        return Hop("tensor", "tensor")
    if following[0] == "tensor":
        return Hop("tensor", "tensor's .grad or base")
    if following[0] == "object":
        return None if isinstance(following[1], torch.Tensor) else Hop("hook", "tensor's hooks")
    return Hop("tensor", "tensor")


def _value(elements: Sequence[Element], at: int) -> Any:
    return elements[at][1] if at < len(elements) else None


def _out_of_object(elements: Sequence[Element], at: int) -> tuple[int, Hop | None]:
    """The reference from this object to the next element, as one hop."""
    owner, target = elements[at][1], _value(elements, at + 1)
    if isinstance(owner, torch.Tensor):
        if elements[at + 1][0] == "tensor":
            return 1, None  # the tensor itself
        name = _key_of(getattr(owner, "__dict__", {}), _value(elements, at + 2)) or ""
        return 2, Hop("attribute", f".{name or '?'} of a tensor", name)
    if isinstance(owner, _C.OffloadSaved):
        return 1, Hop("lease", "tenure.Offload")
    if isinstance(owner, _C.Lease):
        return 1, Hop("lease", f"lease of {owner.owner!r}" if owner.held else "a lease")
    if elements[at + 1][0] != "object":
        what = "ctx" if isinstance(owner, torch.autograd.function.FunctionCtx) else None
        return 1, Hop("object", f"{_type_name(owner)} {what}" if what else _type_name(owner))
    if _is_namespace(owner):
        return 1, _global(owner, target)
    if isinstance(owner, dict):
        return 1, Hop("item", "[a key]" if _is_key(owner, target) else "[…]")
    if isinstance(owner, (list, tuple)):
        return 1, Hop("item", f"[{_index_of(owner, target)}]")
    if isinstance(owner, (set, frozenset, collections.deque)):
        return 1, Hop("item", f"in a {type(owner).__name__}")
    if isinstance(owner, types.CellType):
        return 1, None
    if isinstance(owner, types.FunctionType):
        return _out_of_function(elements, at)
    if isinstance(owner, types.MethodType):
        return 1, Hop("method", f"method {owner.__func__.__qualname__}") if (
            target is owner.__self__
        ) else None
    if isinstance(owner, functools.partial):
        name = getattr(owner.func, "__qualname__", type(owner.func).__qualname__)
        return 1, Hop("partial", f"an argument of functools.partial({name})")
    if isinstance(owner, functools._lru_cache_wrapper):
        bounded = owner.cache_parameters()["maxsize"] is not None
        return 1, Hop("bounded cache" if bounded else "cache", _cache_text(owner))
    if isinstance(owner, types.FrameType):
        return 1, Hop("local", _local_text(owner, target))
    if isinstance(owner, types.TracebackType):
        return 1, None
    if isinstance(owner, BaseException) and target is not _attributes(owner):
        return 1, Hop("exception", _exception_text(owner, target))
    suspended = _frame_of(owner)
    if suspended is not None:
        name = _key_of(suspended.f_locals, target) or "a value"
        what = getattr(owner, "__qualname__", type(owner).__name__)
        file = suspended.f_code.co_filename
        return 1, Hop("local", f"{name} (local of suspended {what})", name, file)
    return _out_of_instance(elements, at)


def _out_of_function(elements: Sequence[Element], at: int) -> tuple[int, Hop | None]:
    function, target = elements[at][1], _value(elements, at + 1)
    if target is function.__closure__ and at + 2 < len(elements):
        cell = elements[at + 2][1]
        names = function.__code__.co_freevars
        index = _index_of(target, cell)
        name = names[index] if isinstance(index, int) and index < len(names) else "?"
        file = function.__code__.co_filename
        return 3, Hop("closure", f"{name} (closure of {function.__qualname__})", name, file)
    if target is function.__globals__:
        name = _key_of(target, _value(elements, at + 2)) or "?"
        file = function.__code__.co_filename
        return 2, Hop("global", f"{name} (global of {function.__module__})", name, file)
    if target is function.__defaults__ or target is function.__kwdefaults__:
        name = _argument_of(function, _value(elements, at + 2))
        text = f"{name or '?'} (default argument of {function.__qualname__})"
        return 2, Hop("default", text, name, function.__code__.co_filename)
    name = _key_of(function.__dict__, _value(elements, at + 2)) or ""
    if target is function.__dict__:
        file = function.__code__.co_filename
        return 2, Hop("attribute", f"{function.__qualname__}.{name or '?'}", name, file)
    return 1, Hop("function", function.__qualname__)


def _argument_of(function: types.FunctionType, default: Any) -> str:
    """The name of the argument that has this default."""
    code, positional = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][-len(positional) :] if positional else ()
    named = {**dict(zip(names, positional, strict=True)), **(function.__kwdefaults__ or {})}
    return _key_of(named, default) or ""


def _out_of_instance(elements: Sequence[Element], at: int) -> tuple[int, Hop | None]:
    owner, target = elements[at][1], _value(elements, at + 1)
    name = owner.__qualname__ if isinstance(owner, type) else type(owner).__qualname__
    held = _attributes(owner)
    if isinstance(owner, nn.Module):
        used, variable = _out_of_module(elements, at, held)
        if variable:
            return used, Hop("attribute", f".{variable} of {name}", variable, _file_of_class(owner))
    if isinstance(owner, threading.local):
        used, variable = _out_of_thread_local(elements, at)
        return used, Hop("attribute", f".{variable} of a threading.local", variable)
    if target is held or (isinstance(owner, type) and isinstance(target, dict)):
        variable = _key_of(target, _value(elements, at + 2)) or "?"
        return 2, Hop("attribute", f".{variable} of {name}", variable, _file_of_class(owner))
    variable = _key_of(held, target) or _slot_of(owner, target) or ""
    if variable:
        return 1, Hop("attribute", f".{variable} of {name}", variable, _file_of_class(owner))
    if isinstance(owner, torch.autograd.function.FunctionCtx):
        return 1, Hop("ctx", f"ctx of {name.removesuffix('Backward')}")
    return 1, Hop("object", _type_name(owner))


def _out_of_module(elements: Sequence[Element], at: int, held: Any) -> tuple[int, str]:
    """A module's parameter, buffer or submodule, which lies in a dict of its own."""
    inner = at + 2 if _value(elements, at + 1) is held else at + 1
    for name in ("_parameters", "_buffers", "_modules"):
        registered = held.get(name)
        if registered is not None and _value(elements, inner) is registered:
            return inner + 1 - at, _key_of(registered, _value(elements, inner + 1)) or ""
    return 1, ""


def _out_of_thread_local(elements: Sequence[Element], at: int) -> tuple[int, str]:
    for inner in range(at + 1, min(at + 5, len(elements) - 1)):
        held = elements[inner][1]
        name = _key_of(held, elements[inner + 1][1]) if isinstance(held, dict) else None
        if name:
            return inner + 1 - at, name
    return 1, "?"


def _file_of_class(owner: Any) -> str:
    kind = owner if isinstance(owner, type) else type(owner)
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ""


def _attributes(owner: Any) -> Any:
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}


def _slot_of(owner: Any, target: Any) -> str | None:
    for base in type(owner).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    if member.__get__(owner) is target:
                        return name
                except AttributeError:
                    continue
    return None


def _frame_of(owner: Any) -> types.FrameType | None:
    for name in ("gi_frame", "cr_frame", "ag_frame"):
        frame = (
            getattr(owner, name, None)
            if isinstance(
                owner, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
            )
            else None
        )
        if isinstance(frame, types.FrameType):
            return frame
    return None


def _local_text(frame: types.FrameType, target: Any) -> str:
    name = _key_of(frame.f_locals, target) or "a value"
    code = frame.f_code
    return f"{name} (local of {code.co_qualname}, {Path(code.co_filename).name}:{frame.f_lineno})"


def _cache_text(owner: Any) -> str:
    name = getattr(owner, "__qualname__", "a function")
    code = getattr(getattr(owner, "__wrapped__", None), "__code__", None)
    if code is None:
        return f"lru_cache of {name}"
    return f"lru_cache of {name} at {Path(code.co_filename).name}:{code.co_firstlineno}"


def _exception_text(error: BaseException, target: Any) -> str:
    name = type(error).__name__
    for attribute in ("__traceback__", "__cause__", "__context__"):
        if getattr(error, attribute) is target:
            return f"{attribute} of {name}"
    return f"arguments of {name}"


def _key_of(mapping: Any, value: Any) -> str | None:
    """The name of a value in a namespace."""
    try:
        items = list(mapping.items())
    except (AttributeError, RuntimeError):
        return None
    return next((key for key, held in items if held is value and isinstance(key, str)), None)


def _is_key(mapping: dict[Any, Any], target: Any) -> bool:
    return any(key is target for key in list(mapping))


def _index_of(sequence: Sequence[Any], target: Any) -> int | str:
    return next((i for i, value in enumerate(sequence) if value is target), "…")


def _type_name(value: Any) -> str:
    kind = type(value)
    module = kind.__module__
    return (
        kind.__qualname__ if module in {"builtins", "__main__"} else f"{module}.{kind.__qualname__}"
    )


def own_objects() -> list[Any]:
    """Objects of Tenure's that a graph must not be followed through."""
    mine = [name for name in sys.modules if name == "tenure" or name.startswith("tenure.")]
    modules = [vars(sys.modules[name]) for name in mine]
    files = [
        value.__code__.co_filename
        for module in modules
        for value in module.values()
        if isinstance(value, types.FunctionType)
    ]
    return [*modules, *files]
