"""The step clock: one counter, whoever announces a step's end."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from tenure import _C
from tenure._C import Subscription

__all__ = ["Subscription", "follow_optimizers", "new_announcer", "on_step", "step", "steps"]

_USER = 1 << 32  # announcers are told apart by number; names of scopes lie below
_numbers = itertools.count(_USER + 1)
_optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def step() -> None:
    """Says that a training step has ended.

    Needed only where Tenure cannot see it: a scope named ``step`` says it too, and several
    announcements of one step count once. Whoever announces first leads, and the leader's numbers
    are the clock's: where this call leads, steps are counted on from the last one, and the counters
    of ``step`` scopes are not looked at.

    Example:
        >>> import tenure
        >>> tenure.step()
        >>> tenure.steps() > 0
        True
    """
    _C.tick_explicit(_USER, None)


def new_announcer() -> int:
    """A number by which the clock knows who announces steps."""
    return next(_numbers)


def no_more_steps() -> None:
    """Says that :func:`step` is not called for now: optimizers count again."""
    _C.leave_clock(_USER)


def steps() -> int:
    """How many steps have ended."""
    return _C.step_now()


def on_step(fn: Callable[[int], None]) -> Subscription:
    """Calls `fn` with the number of each step that ends, until the subscription ends or goes.

    What `fn` raises arrives where the step was announced. If another exception ends the step, or
    its scope raises ScopeError, that one goes on and `fn`'s goes to :func:`sys.unraisablehook`.
    """
    return _C.on_step(fn)


def follow_optimizers() -> RemovableHandle:
    """Counts the steps of optimizers, for programs that announce none themselves.

    The first optimizer to step leads: others that step with it count with it. Once a step is
    announced by :func:`step` or by a scope named ``step``, optimizers are not counted any more.

    Returns:
        A handle whose ``remove()`` ends it and leaves no hook behind.
    """

    def count(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        _C.tick_implicit(_optimizers.setdefault(optimizer, next(_numbers)))

    return register_optimizer_step_post_hook(count)
