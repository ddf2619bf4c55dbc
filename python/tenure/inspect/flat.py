"""Proof that a step keeps memory flat: :func:`assert_flat`, and what the pytest marker uses."""

from __future__ import annotations

from collections.abc import Callable

from tenure import clock
from tenure.errors import InputError
from tenure.inspect import verdicts
from tenure.inspect.session import watch_apart

__all__ = ["MemoryGrows", "assert_flat"]

_FEWEST = 14


class MemoryGrows(AssertionError):  # noqa: N818  says what happened
    """Memory grew from step to step; the text names who holds what.

    Attributes:
        verdict: The whole verdict, as in the JSON file.
    """

    def __init__(self, verdict: verdicts.Document) -> None:
        """Says it as the first screen does."""
        super().__init__(verdicts.first_screen(verdict))
        self.verdict = verdict


def assert_flat(step: Callable[[], object], *, steps: int = 40, warmup: int = 3) -> None:
    """Calls `step` again and again, and raises if memory grows with it.

    Args:
        step: One training step, or anything else that should leave no memory behind.
        steps: How often to call it and watch; at least 14.
        warmup: Calls before that, unwatched: optimizers make their state, caches fill.

    Raises:
        MemoryGrows: An AssertionError that names what grows and who holds it.
        InputError: `steps` is too small to tell.

    Example:
        >>> import tenure, torch
        >>> kept = []
        >>> try:
        ...     tenure.assert_flat(lambda: kept.append(torch.zeros(4096)))
        ... except tenure.MemoryGrows as error:
        ...     print(str(error).splitlines()[0].split(" since")[0])
        LEAK +16.4 kB/step
    """
    if steps < _FEWEST:
        raise InputError(f"steps={steps} is too few to tell growth from noise: use {_FEWEST}")
    for _ in range(warmup):
        step()
    with watch_apart() as session:
        try:
            for _ in range(steps):
                step()
                clock.step()
            verdict = session.verdict()
        finally:
            clock.no_more_steps()
    if verdict["verdict"] in {"leak", "growth"}:
        raise MemoryGrows(verdict)
