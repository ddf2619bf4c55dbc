"""The backwards that run through a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from tenure import _C

__all__ = ["Backwards", "current_backward"]


def current_backward() -> int:
    """A number for the backward that this thread works for; -1: none."""
    number: int = torch._C._current_graph_task_id()
    return number


class _End:
    """What the engine calls at the end of a backward, and has as long as that lives."""

    __slots__ = ("__weakref__", "_ended", "_number")

    def __init__(self, number: int, ended: Callable[[int], None]) -> None:
        self._number = number
        self._ended = ended

    def __call__(self) -> None:
        self._ended(self._number)


class Backwards:
    """Those that run, each with what it will do: several where one computes within another.

    The engine tells nobody of a backward that an exception has ended, but drops what it would have
    called.
    """

    def __init__(self) -> None:
        """None runs."""
        self._running: dict[int, tuple[_C.Course, weakref.ref[_End] | None]] = {}

    def __len__(self) -> int:
        """How many run, or have failed and were not asked for."""
        return len(self._running)

    def course(self, ended: Callable[[int], None]) -> _C.Course:
        """Of the one that this thread works for; asked at first, its end calls `ended`."""
        number = current_backward()
        if number not in self._running:
            end = _End(number, ended)
            self._running[number] = _C.Course(), weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return self._running[number][0]

    def begin_end(self, number: int) -> bool:
        """One is about to end, and has failed if it is not over() by then; was it the outermost?"""
        course, _ = self._running[number]
        self._running[number] = course, None
        return len(self._running) == 1

    def over(self, number: int) -> None:
        """One has ended well."""
        del self._running[number]

    def take_failed(self) -> list[int]:
        """Those that will not end any more; they are forgotten."""
        failed = [
            number for number, (_, end) in self._running.items() if end is None or end() is None
        ]
        for number in failed:
            del self._running[number]
        return failed

    def clear(self) -> None:
        """None runs."""
        self._running.clear()
