"""The step clock: one counter, whoever announces a step's end."""

from __future__ import annotations

from collections.abc import Callable

from tenure import _C
from tenure._C import Subscription

__all__ = ["Subscription", "on_step", "step", "steps"]

_USER = 1 << 32  # announcers are told apart by number; names of scopes lie below


def step() -> None:
    """Says that a training step has ended.

    Needed only where Tenure cannot see it: a scope named ``step`` says it too, and several
    announcements of one step count once.

    Example:
        >>> import tenure
        >>> before = tenure.steps()
        >>> tenure.step()
        >>> tenure.steps() - before
        1
    """
    _C.tick_explicit(_USER, None)


def steps() -> int:
    """How many steps have ended."""
    return _C.step_now()


def on_step(fn: Callable[[int], None]) -> Subscription:
    """Calls `fn` with the number of each step that ends, until the subscription is ended or gone."""
    return _C.on_step(fn)
