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

from tenure import _C
from tenure.errors import InputError
from tenure.sharding.backwards import current_backward

if TYPE_CHECKING:
    from tenure.sharding.sharded import Sharded

__all__ = [
    *("Frame", "Unit", "has_ended", "keep_last", "keep_out_of_graphs", "require_no_transform"),
    "watch_calls",
]


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


def _require_plain(gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise InputError(
            "backward(create_graph=True): there are no gradients of gradients of a sharded "
            "model, for its parameters are released when they would be needed"
        )


def require_no_transform() -> None:
    """Raises InputError in `torch.func.grad` and its like, but not in `vmap`."""
    functorch: Any = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    if any(one.key() != functorch.TransformType.Vmap for one in stack):
        raise InputError(
            "torch.func transforms see other tensors than those that a sharded model gathers: use "
            "backward() or torch.autograd.grad()"
        )


def has_ended(frame: FrameType) -> bool:
    """Whether what the frame is of does not run any more."""
    try:
        frame.clear()
    except RuntimeError:  # it still runs
        return False
    return True


def watch_calls(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> int:
    """Calls these first and last of all hooks; returns the number of the last one."""
    module.register_forward_pre_hook(before, prepend=True)
    return module.register_forward_hook(after, with_kwargs=True, always_call=True).id


def keep_last(module: nn.Module, hook: int) -> None:
    """Others that came since may read parameters: it goes behind them."""
    hooks = module._forward_hooks
    if next(reversed(hooks)) != hook:
        hooks[hook] = hooks.pop(hook)


def keep_out_of_graphs() -> None:
    """Has Dynamo leave alone what hooks do where a module is not compiled as a whole.

    Hooks that run beside graphs would be compiled apart, as if they were in one.
    """
    import torch._dynamo
    from torch._dynamo.eval_frame import skip_code

    from tenure.sharding.parts import Part

    disable: Any = torch._dynamo.disable  # which has no types
    if not hasattr(Unit.enter_forward, "_torchdynamo_disable"):
        Unit.enter_forward = disable(Unit.enter_forward)  # type: ignore[method-assign]
        Unit.leave_forward = disable(Unit.leave_forward)  # type: ignore[method-assign]
        for hook in (Unit._before, Unit._after, Part._before, Part._after):
            skip_code(hook.__code__)


class _Call:
    """One forward of a unit that a backward may follow.

    Its outputs tell when that begins, the nodes that it has made tell when it is over.
    """

    __slots__ = ("__weakref__", "entered", "nodes", "passed", "unit", "values")

    def __init__(self, unit: Unit, values: list[tuple[int, int]]) -> None:
        """Which values there were: the units' numbers, and what `Sharder.enter()` said."""
        self.unit = unit
        self.values = values
        self.nodes = _C.Stretch()
        self.start_over()

    def start_over(self) -> None:
        self.entered = False
        self.passed = False
        self.nodes.forget()

    def end(self, left: object) -> None:
        """The forward is over, and has left these."""
        self.nodes.end()
        for tensor in _needing_grad(left):
            if self.nodes.made(tensor):
                _hook(tensor, self._enter)

    def _enter(self, _gradient: torch.Tensor) -> None:
        course = self.unit.model.backward_runs()  # asked first: one that failed may have entered it
        if not self.entered:
            self.unit.enter_backward(self, course)

    def follow(self, course: _C.Course) -> bool:
        """Whether the backward runs any of its nodes; if so `passed` is set after the last."""
        weak = weakref.ref(self)  # the nodes have what they call: a cycle would outlive the model

        def passed() -> None:
            call = weak()
            if call is not None:
                call.passed = True
                call.unit.touch()

        return self.nodes.follow(course, passed)


class Frame:
    """What a forward that has begun must undo, however it ends."""

    def __init__(self) -> None:
        self.entered: list[Unit] = []
        self.values: list[tuple[int, int]] = []
        self.call: _Call | None = None


class Unit:
    """A module whose parameters are gathered while it is used.

    Note [The last use in backward]
    Two things must have happened before nothing of a backward reads a unit any more: it has run all
    nodes that the unit's forwards have made, as far as it runs them (Note [The last reader of a
    forward] in course.h); and all gradients of the unit's own parameters have come that come in it,
    for such a gradient may be the parameter itself, and hooks on it may read that.
    """

    def __init__(self, number: int, model: Sharded, flats: list[list[nn.Parameter]]) -> None:
        """Watches the gradients of the gathered parameters, which are given by flat."""
        self.number = number
        self.model = model
        self.needs: list[Unit] = []  # others that own a parameter that is used here
        self._frames: list[Frame] = []
        self._last_hook = -1
        self._calls: list[_Call] = []  # through which a backward runs
        self._backward = -1  # which
        self._came = False  # gradients of parameters, since they were added up
        self._to_come: dict[int, int] = {}  # gradients of parameters, by backward
        # They have hooks that have this: a cycle would outlive the model.
        self._flats = [[weakref.ref(one) for one in flat] for flat in flats]
        self._watched: set[tuple[int, int]] = set()
        self.train([[one.requires_grad for one in flat] for flat in flats])

    def train(self, trained: list[list[bool]]) -> None:
        """Which of the gathered parameters have gradients, by flat."""
        for flat, index, parameter in self._parameters():
            wanted = trained[flat][index]
            parameter.requires_grad_(wanted)
            if wanted and (flat, index) not in self._watched:
                self._watched.add((flat, index))
                add: Any = parameter.register_post_accumulate_grad_hook
                add(self._taker(flat, index))

    def trained(self, known: list[list[bool]]) -> list[list[bool]]:
        """The same as the parameters have it; of those that are gone as it was known."""
        found = [list(flat) for flat in known]
        for flat, index, parameter in self._parameters():
            found[flat][index] = parameter.requires_grad
        return found

    def install(self, module: nn.Module) -> None:
        """From now on the module's forward gathers and releases."""
        self._last_hook = watch_calls(module, self._before, self._after)

    # Forward.

    def _before(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or self.model.held:
            return  # the graph gathers, or it is gathered
        keep_last(module, self._last_hook)
        self.enter_forward(sys._getframe(1))

    def _after(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.model.held:
            return
        self.leave_forward((output, args, kwargs))

    def is_used(self) -> bool:
        """Whether it is gathered for a forward that runs, or a backward that goes through it."""
        return bool(self._frames or self._calls)

    def innermost(self) -> Frame | None:
        """The forward that was entered last of those that run."""
        return self._frames[-1] if self._frames else None

    def enter_forward(self, running: FrameType) -> None:
        """The module is called, by a frame that runs as long as it does."""
        self.model.begin(running)
        frame = Frame()
        self._frames.append(frame)
        for unit in (*self.needs, self):
            values = self.model.sharder.enter(unit.number, "forward")
            frame.entered.append(unit)
            frame.values.append((unit.number, values))
        if torch.is_grad_enabled():
            frame.call = _Call(self, frame.values)

    def leave_forward(self, left: object) -> None:
        """It has returned, or raised, and left these: what it was given may be its work, too."""
        if not self._frames:
            return  # it was never entered, for what would have did not come that far
        frame = self._frames.pop()
        with ExitStack() as ending:  # all of it, whatever raises
            ending.callback(self.model.end)
            for unit in frame.entered:
                ending.callback(self.model.sharder.leave, unit.number, "forward")
            if frame.call is not None:
                frame.call.end(left)

    # Backward.

    def enter_backward(self, call: _Call, course: _C.Course) -> None:
        """A backward comes to what this call has left."""
        if not call.follow(course):
            return  # it only looks at gradients of these tensors
        for number, values in call.values:
            self.model.sharder.require_values(number, values)
        self._await_gradients(course)
        if not self._calls:
            self._backward = current_backward()
            for unit in (*self.needs, self):
                self.model.sharder.enter(unit.number, "backward")
        call.entered = True
        self._calls.append(call)

    def _await_gradients(self, course: _C.Course) -> None:
        number = current_backward()
        if number not in self._to_come:
            leaves = [parameter for _, _, parameter in self._parameters()]
            self._to_come[number] = course.gradients(leaves)

    def hand_over(self, gradients: int) -> None:
        """So many are given by a compiled graph that the backward has come to, not by autograd."""
        number = current_backward()
        if number in self._to_come:
            self._to_come[number] -= gradients

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
        self._await_gradients(self.model.backward_runs())
        self.model.sharder.take(self.number, flat, index, gradient)
        self._to_come[current_backward()] -= 1
        self._came = True
        self.touch()

    def touch(self) -> None:
        """Something of a backward has read it; ends its use there, if that was the last."""
        self.model.sharder.touch(self.number)
        passed = all(call.passed for call in self._calls)
        if self._calls and passed and all(left <= 0 for left in self._to_come.values()):
            self._finish()

    def end_backward(self, number: int) -> None:
        """That backward is over, whatever it has left out here."""
        self._to_come.pop(number, None)
        if (self._calls and self._backward == number) or (not self._calls and self._came):
            self._finish()

    def give_up(self, number: int) -> None:
        """An exception has ended that backward: what came of gradients is not added up."""
        self._to_come.pop(number, None)
        self._came = False
        if self._backward == number:
            self._leave_backward()

    def _finish(self) -> None:
        self._came = False
        self._leave_backward()
        self.model.sharder.add_up(self.number)

    def _leave_backward(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call.start_over()  # a retained graph may be gone through again
        if calls:
            for unit in reversed((*self.needs, self)):
                self.model.sharder.leave(unit.number, "backward")

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
        self._to_come.clear()
        self._came = False
