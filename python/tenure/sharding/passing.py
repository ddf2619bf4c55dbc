"""When a unit of a model is used: the hooks of modules and of autograd's graph."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tenure.errors import InputError

if TYPE_CHECKING:
    from tenure.sharding.sharded import Sharded

__all__ = ["Unit", "current_backward", "keep_out_of_graphs"]


def current_backward() -> int:
    """A number for the backward that this thread works for; -1: none."""
    number: int = torch._C._current_graph_task_id()
    return number


def _needing_grad(tree: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Tensors in containers, and in objects that are no more than their attributes."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                yield leaf
        elif depth > 0 and not isinstance(leaf, nn.Module | type) and hasattr(leaf, "__dict__"):
            yield from _needing_grad(list(vars(leaf).values()), depth - 1)


# torch's stubs leave these out.
def _hook(tensor: Any, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(hook)
    return handle


def _metadata(node: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = node.metadata
    return found


def _require_plain(gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise InputError(
            "backward(create_graph=True): there are no gradients of gradients of a sharded "
            "model, for its parameters are released when they would be needed"
        )


def keep_out_of_graphs() -> None:
    """Has Dynamo leave alone what hooks do where a module is not compiled as a whole.

    Hooks that run beside graphs would be compiled apart, as if they were in one.
    """
    import torch._dynamo
    from torch._dynamo.eval_frame import skip_code

    disable: Any = torch._dynamo.disable  # which has no types
    if not hasattr(Unit.enter_forward, "_torchdynamo_disable"):
        Unit.enter_forward = disable(Unit.enter_forward)  # type: ignore[method-assign]
        Unit.leave_forward = disable(Unit.leave_forward)  # type: ignore[method-assign]
        for hook in (Unit._before, Unit._after):
            skip_code(hook.__code__)


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
            handle = _hook(tensor, border.cross)
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn).setdefault(_Border, border)
            else:
                self.unit.model.leaf_hooks.append(handle)

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
        # They have hooks that have this: a cycle would outlive the model.
        self._flats = [[weakref.ref(one) for one in flat] for flat in flats]
        self._watched: set[tuple[int, int]] = set()
        self.train([[one.requires_grad for one in flat] for flat in flats])

    def train(self, trained: list[list[bool]]) -> None:
        """Which of the gathered parameters have gradients, by flat."""
        self._expected = 0
        for flat, index, parameter in self._parameters():
            wanted = trained[flat][index]
            parameter.requires_grad_(wanted)
            self._expected += wanted
            if wanted and (flat, index) not in self._watched:
                self._watched.add((flat, index))
                add: Any = parameter.register_post_accumulate_grad_hook
                add(self._taker(flat, index))

    def install(self, module: nn.Module) -> None:
        """From now on the module's forward gathers and releases."""
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        self._last_hook = after.id

    # Forward.

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self.model.held:
            return  # the graph gathers, or it is gathered
        self.enter_forward(module, args, kwargs, sys._getframe(1))

    def _after(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.model.held:
            return
        self.leave_forward(output)

    def enter_forward(self, module: nn.Module, args: Any, kwargs: Any, running: FrameType) -> None:
        """The module is called, by a frame that runs as long as it does."""
        hooks = module._forward_hooks
        if next(reversed(hooks)) != self._last_hook:
            # Others came since, and may read parameters: to the end.
            hooks[self._last_hook] = hooks.pop(self._last_hook)
        self.model.begin(running)
        frame = _Frame()
        self._frames.append(frame)
        for unit in (*self.needs, self):
            self.model.sharder.enter(unit.number, "forward")
            frame.entered.append(unit)
        if torch.is_grad_enabled():
            frame.call = _Call(self)
            frame.call.watch_inputs((args, kwargs))

    def leave_forward(self, output: Any) -> None:
        """It has returned, or raised."""
        if not self._frames:
            return  # it was never entered, for what would have did not come that far
        frame = self._frames.pop()
        with ExitStack() as ending:  # all of it, whatever raises
            ending.callback(self.model.end)
            for unit in frame.entered:
                ending.callback(self.model.sharder.leave, unit.number, "forward")
            if frame.call is not None:
                frame.call.watch_outputs(output)

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
        weak = weakref.ref(self)  # a compiled graph has the parameter, and may outlive the model

        def take(parameter: torch.Tensor) -> None:
            unit = weak()
            if unit is not None and unit.model.held:
                return  # added up there, as in any parameter, until the hold ends
            gradient, parameter.grad = parameter.grad, None
            # None: a compiled graph has handed it over.
            if gradient is not None and unit is not None:
                unit.take(flat, index, gradient)

        return take

    def take(self, flat: int, index: int, gradient: torch.Tensor) -> None:
        """A parameter's gradient has come."""
        _require_plain(gradient)
        self.model.backward_runs()
        self.model.sharder.take(self.number, flat, index, gradient)
        self._came += 1
        self.touch()

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
        self.model.sharder.add_up(self.number)

    # Held.

    def add_up(self) -> None:
        """A hold is over: what backwards have left in the parameters is added up over ranks."""
        for flat, index, parameter in self._parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                _require_plain(gradient)
                self.model.sharder.take(self.number, flat, index, gradient)
        self.model.sharder.add_up(self.number)

    def drop_gradients(self) -> None:
        """A hold was given up."""
        for _, _, parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Those that are alive, by flat and place in it: a module may have been replaced."""
        for flat, parameters in enumerate(self._flats):
            for index, weak in enumerate(parameters):
                parameter = weak()
                if parameter is not None:
                    yield flat, index, parameter

    def forget(self) -> None:
        """A pass was given up: an exception has ended it."""
        self._frames.clear()
        for call in self._calls:
            call.start_over()
        self._calls.clear()
        self._came = 0
