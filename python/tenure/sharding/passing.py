"""When a unit of a model is used: the hooks of modules and of autograd's graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tenure import _C

__all__ = ["Call", "Unit"]


def _needing_grad(tree: object) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf


class Call:
    """One forward of a unit that a backward may follow.

    Its inputs tell when the backward through it is over: what produced them runs after all that
    read them.
    """

    __slots__ = ("__weakref__", "crossed", "entered", "inputs", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.inputs = 0
        self.crossed = 0
        self.entered = False

    def watch_inputs(self, tree: object) -> None:
        for tensor in _needing_grad(tree):
            self.inputs += 1
            if tensor.grad_fn is None:
                tensor.register_hook(self._cross)
            else:
                tensor.grad_fn.register_prehook(self._cross)

    def watch_outputs(self, tree: object) -> None:
        for tensor in _needing_grad(tree):
            tensor.register_hook(self._enter)

    def _enter(self, _gradient: torch.Tensor) -> None:
        if not self.entered:
            self.entered = True
            self.unit.enter_backward(self)

    def _cross(self, _gradients: Any) -> None:
        self.crossed += 1
        if self.entered and self.crossed == self.inputs:
            self.unit.left_by(self)


class Unit:
    """A module whose parameters are gathered while it is used."""

    def __init__(self, number: int, name: str, model: Any, flats: list[list[nn.Parameter]]) -> None:
        self.number = number
        self.name = name
        self._model = model
        self._sharder: _C.Sharder = model.sharder
        self.flats = flats  # gathered, in their true shapes
        self.needs: list[Unit] = []
        self._under_way: set[Call] = set()
        self._arrived = 0
        for index, parameters in enumerate(flats):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(self._gradient_came, index)
                )

    def install(self, module: nn.Module) -> None:
        self._calls: list[Call | None] = []
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    # Forward.

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._model.begin(self)
        for other in self.needs:
            other.enter("forward")
        self.enter("forward")
        call = Call(self) if torch.is_grad_enabled() else None
        if call is not None:
            call.watch_inputs((args, kwargs))
        self._calls.append(call)

    def _after(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if not self._calls:
            return  # the hook before it raised
        call = self._calls.pop()
        if call is not None:
            call.watch_outputs(output)
        self.leave("forward")
        for other in self.needs:
            other.leave("forward")
        self._model.end(self)

    def enter(self, phase: str) -> None:
        self._sharder.enter(self.number, phase)

    def leave(self, phase: str) -> None:
        self._sharder.leave(self.number, phase)

    # Backward.

    def enter_backward(self, call: Call) -> None:
        self._model.backward_began()
        if not self._under_way:
            for other in self.needs:
                other.enter("backward")
            self.enter("backward")
        self._under_way.add(call)

    def left_by(self, call: Call) -> None:
        """The backward through one call has passed its inputs."""
        self._under_way.discard(call)
        if not self._under_way and self._complete():
            self._finish()
        elif not self._under_way:
            self._under_way.add(call)  # gradients are still to come

    def _expected(self) -> int:
        return sum(p.requires_grad for parameters in self.flats for p in parameters)

    def _complete(self) -> bool:
        return self._arrived >= self._expected()

    def _gradient_came(self, _flat: int, _parameter: torch.Tensor) -> None:
        self._arrived += 1
        crossed = all(call.inputs and call.crossed == call.inputs for call in self._under_way)
        if self._complete() and crossed:
            self._finish()

    def _finish(self) -> None:
        """Nothing of this backward reads the unit any more."""
        if self._under_way:
            self._under_way.clear()
        self.leave_backward()

    def leave_backward(self) -> None:
        self.leave("backward")
        for other in self.needs:
            other.leave("backward")
        self._reduce()

    def end_backward(self) -> None:
        """The whole backward is over, whatever it left out here."""
        if self._under_way:
            self._finish()
        elif self._arrived:
            self._reduce()

    def forget(self) -> None:
        """A pass was given up."""
        self._under_way.clear()
        self._calls.clear()
        self._arrived = 0

    def _reduce(self) -> None:
        self._arrived = 0
        if not self._model.adds_up:
            return
        for index, parameters in enumerate(self.flats):
            gradients = [parameter.grad for parameter in parameters]
            if all(gradient is None for gradient in gradients):
                continue
            self._model.take(self._sharder.reduce(self.number, index, gradients))
            for parameter in parameters:
                parameter.grad = None
