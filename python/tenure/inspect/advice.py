"""What to do about a leak, where its pattern is known."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from tenure import _C
from tenure.inspect.holders import Element, Hop
from tenure.inspect.source import is_library

__all__ = ["DETACH", "for_cycle", "for_path"]

DETACH = "keep value.detach() or value.item(): this one brings its autograd graph along"
_CACHE = "give lru_cache a maxsize, or keep tensors out of its arguments and results"
_BOUNDED = "lower the cache's maxsize: what it keeps gets larger"
_EXCEPTION = "keep str(error) instead of the exception: its traceback holds every local"
_HOOK = "remove the hook when it is not needed any more: handle.remove()"
_CLOSURE = "let the function close over a detached tensor or a number, or drop the function"


def for_path(hops: Sequence[Hop], path: Sequence[Element]) -> str:
    """Advice on a path from a root; empty if none is known to fit."""
    kinds = {hop.kind for hop in hops}
    if kinds & {"cache", "bounded cache"}:
        return _CACHE if "cache" in kinds else _BOUNDED
    if "exception" in kinds:
        return _EXCEPTION
    if any(_is_hook(hop) for hop in hops):
        return _HOOK
    if _closes_over_tensor(hops):
        return _CLOSURE
    if "graph" in kinds:
        return DETACH
    if _pins_base(path):
        return "keep a .clone() of the part that is needed: the view pins its whole base"
    return ""


def _is_hook(hop: Hop) -> bool:
    return (
        hop.kind == "hook"
        or (hop.kind == "graph" and hop.text.endswith(" hook"))
        or (hop.kind == "attribute" and hop.name.endswith("_hooks"))
    )


def _closes_over_tensor(hops: Sequence[Hop]) -> bool:
    """Whether ever more functions of the user's have a tensor each, not one a container."""
    marked = next((i for i, hop in enumerate(hops) if hop.leak), 0)
    return any(
        hop.kind == "closure"
        and not is_library(hop.file)
        and all(after.kind in {"tensor", "graph"} for after in hops[at + 1 :])
        for at, hop in enumerate(hops)
        if at >= marked
    )


def for_cycle(cycle: Sequence[Element], collectable: bool) -> str:
    """Advice on storages that hold each other."""
    objects = [shown for kind, shown, *_ in cycle if kind == "object"]
    if any(isinstance(shown, torch.autograd.function.FunctionCtx) for shown in objects):
        return "use ctx.save_for_backward() for the output instead of an attribute of ctx"
    if not collectable and any(isinstance(shown, types.FunctionType) for shown in objects):
        return "let the hook close over a detached tensor: it and the graph hold each other"
    if collectable:
        return "make one direction a weakref, or let Python's collector run (gc.collect())"
    return "make one direction of the cycle a weakref"


def _pins_base(path: Sequence[Element]) -> bool:
    tensors = [shown for kind, shown, *_ in path if kind == "object" and _is_tensor(shown)]
    if not tensors:
        return False
    last: Any = tensors[-1]
    whole = _C.storage_bytes(last)
    return whole is not None and 2 * last.numel() * last.element_size() <= whole


def _is_tensor(shown: object) -> bool:
    return issubclass(type(shown), torch.Tensor)
