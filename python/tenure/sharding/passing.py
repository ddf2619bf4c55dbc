"""When a unit of a model is used: the hooks of modules and of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tenure.errors import InputError

if TYPE_CHECKING:
    from tenure.sharding.sharded import Sharded

__all__ = ["Unit", "current_backward"]


def current_backward() -> int:
    """A number for the backward that this thread works for; -1: none."""
    number: int = torch._C._current_graph_task_id()
    return number


def _needing_grad(tree: object) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf


# torch's stubs leave these out.
def _hook(tensor: Any, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(hook)
    return handle


def _metadata(node: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = node.metadata
    return found


class _Call:
    """One forward of a unit that a backward may follow.

    Its outputs tell when that begins. Its inputs tell when it is over: what made them runs after
    all that has read them.
    """

    __slots__ = ("crossed", "entered", "inputs", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.inputs = 0
        self.start_over()

    def start_over(self) -> None:
        self.entered = False
        self.crossed = 0

    def watch_inputs(self, tree: object) -> None:
        for tensor in _needing_grad(tree):
            self.inputs += 1
            if tensor.grad_fn is None:
                self.unit.model.leaf_hooks.append(_hook(tensor, self._cross))
            elif (border := _metadata(tensor.grad_fn).get(_Border)) is not None:
                border.crossed_by.append(self._cross)
            else:
                tensor.grad_fn.register_prehook(self._cross)

    def watch_outputs(self, tree: object) -> None:
        for tensor in _needing_grad(tree):
            border = _Border(self._enter)
            _hook(tensor, border.cross)
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn).setdefault(_Border, border)

    def _enter(self) -> None:
        if not self.entered:
            self.entered = True
            self.unit.enter_backward(self)

    def _cross(self, _gradients: Any) -> None:
        if self.entered:
            self.crossed += 1
            self.unit.touch()


class _Border:
    """Where a backward goes from units to the one before them.

    It leaves those first, so that no two are gathered because of it. It lies in the metadata of
    autograd's node and refers to calls, which hold no tensor.
    """

    __slots__ = ("_enter", "crossed_by")

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter
        self.crossed_by: list[Callable[[Any], None]] = []

    def cross(self, gradient: torch.Tensor) -> None:
        for leave in self.crossed_by:
            leave(gradient)
        self._enter()


class _Frame:
    """What a forward that has begun must undo, however it ends."""

    def __init__(self) -> None:
        self.entered: list[Unit] = []
        self.call: _Call | None = None


class Unit:
    """A module whose parameters are gathered while it is used.

    Note [The last use in backward]
    Two things must have happened before nothing of a backward reads a unit any more: it has passed
    the inputs of all calls that it has entered, so that gradients of inputs are done, which read
    weights; and all gradients of the unit's own parameters have come, which may read weights too
    (those of a normalised weight do). A parameter that has no part in this backward never gets one:
    then the end of the whole backward is the last use.
    """

    def __init__(self, number: int, model: Sharded, flats: list[list[nn.Parameter]]) -> None:
        """Watches the gradients of the gathered parameters, which are given by flat."""
        self.number = number
        self.model = model
        self.needs: list[Unit] = []  # others that own a parameter that is used here
        self._frames: list[_Frame] = []
        self._last_hook = -1
        self._calls: list[_Call] = []  # through which a backward runs
        self._backward = -1  # which
        self._came = 0  # gradients of parameters
        self._expected = 0
        for flat, parameters in enumerate(flats):
            for index, parameter in enumerate(parameters):
                if parameter.requires_grad:
                    self._expected += 1
                    add: Any = parameter.register_post_accumulate_grad_hook
                    add(self._taker(flat, index))

    def install(self, module: nn.Module) -> None:
        """From now on the module's forward gathers and releases."""
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        self._last_hook = after.id

    # Forward.

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the graph gathers
        hooks = module._forward_hooks
        if next(reversed(hooks)) != self._last_hook:
            # Others came since, and may read parameters: to the end.
            hooks[self._last_hook] = hooks.pop(self._last_hook)
        self.model.begin()
        frame = _Frame()
        self._frames.append(frame)
        for unit in (*self.needs, self):
            self.model.sharder.enter(unit.number, "forward")
            frame.entered.append(unit)
        if torch.is_grad_enabled():
            frame.call = _Call(self)
            frame.call.watch_inputs((args, kwargs))

    def _after(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._frames:
            return  # a compiled forward that fails is left without having been entered
        frame = self._frames.pop()
        if frame.call is not None:
            frame.call.watch_outputs(output)
        for unit in reversed(frame.entered):
            self.model.sharder.leave(unit.number, "forward")
        self.model.end()

    # Backward.

    def enter_backward(self, call: _Call) -> None:
        """A backward comes to what this call has returned."""
        self.model.backward_runs()
        if not self._calls:
            self._backward = current_backward()
            for unit in (*self.needs, self):
                self.model.sharder.enter(unit.number, "backward")
        self._calls.append(call)

    def _taker(self, flat: int, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return  # a compiled graph has handed it over
            if gradient.requires_grad:
                raise InputError(
                    "backward(create_graph=True) cannot be sharded: "
                    "use torch.autograd.grad() of what the units return"
                )
            self.model.backward_runs()
            self.model.sharder.take(self.number, flat, index, gradient)
            self._came += 1
            self.touch()

        return take

    def touch(self) -> None:
        """Something of a backward has read it; ends its use there, if that was the last."""
        self.model.sharder.touch(self.number)
        crossed = all(call.crossed >= call.inputs for call in self._calls)
        if self._calls and crossed and self._came >= self._expected:
            self._finish()

    def end_backward(self, number: int) -> None:
        """That backward is over, whatever it has left out here."""
        if (self._calls and self._backward == number) or (not self._calls and self._came):
            self._finish()

    def _finish(self) -> None:
        calls, self._calls = self._calls, []
        self._came = 0
        if calls:
            for unit in reversed((*self.needs, self)):
                self.model.sharder.leave(unit.number, "backward")
        for call in calls:
            call.start_over()  # a retained graph may be gone through again
        self.model.set_gradients(self.model.sharder.reduce(self.number))

    def forget(self) -> None:
        """A pass was given up: an exception has ended it."""
        for call in self._calls:
            call.start_over()
        self._calls.clear()
        self._came = 0
