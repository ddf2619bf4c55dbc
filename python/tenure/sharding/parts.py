"""Modules within a unit that a program calls without what is around them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tenure.sharding.passing import Frame, Unit, keep_last, watch_calls

__all__ = ["Part", "nearest", "parts_of"]


class Part:
    """A module in a unit, such as the encoder or the embedding of a model.

    A program may call it alone, as generation calls an encoder: then it gathers its unit.
    """

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        """From now on its forward does so."""
        self._unit = unit
        self._alone: Frame | None = None  # while it is called so
        self._within = 0  # calls of itself in that one
        self._last_hook = watch_calls(module, self._before, self._after)

    def _before(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or self._unit.model.held:
            return
        if self._alone is not None and self._alone is self._unit.innermost():
            self._within += 1
            return
        self._alone, self._within = None, 0  # or left by Ctrl-C, of which no hook is told
        if self._unit.is_used():
            return
        keep_last(module, self._last_hook)
        try:
            self._unit.enter_forward(sys._getframe(1))
        finally:
            self._alone = self._unit.innermost()

    def _after(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._alone is None:
            return
        if self._alone is not self._unit.innermost():
            self._alone = None
        elif self._within > 0:
            self._within -= 1
        else:
            self._alone = None
            self._unit.leave_forward((output, args, kwargs))


def nearest(path: str, units: dict[str, int]) -> int:
    """The unit around a module. REQUIRES that the model itself is one."""
    while path not in units:
        path = path.rpartition(".")[0]
    return units[path]


def parts_of(model: nn.Module, units: dict[str, int]) -> list[nn.Module]:
    """Modules that have parameters of the model's own unit, and what is around them in it."""
    named = dict(model.named_modules())
    found = set()
    for path, module in named.items():
        is_sharded = any(name in module.__dict__ for name in module._parameters)
        if is_sharded and nearest(path, units) == units[""]:
            found |= {path, *(path[:end] for end, letter in enumerate(path) if letter == ".")}
    return [named[path] for path in sorted(found - {""})]
