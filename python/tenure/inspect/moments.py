"""A safe moment: where in a running program the graph of references may be looked at.

The GIL keeps Python still, and not autograd. So a look is taken between two bytecodes of the main
thread, or by the thread that asks where the main thread sleeps in a call; and only when all other
threads have come to rest and none is inside backward().
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from tenure import _C
from tenure.errors import TenureError
from tenure.inspect.source import is_library

__all__ = ["Job", "MainThread", "NotNow", "at_rest", "in_backward"]

_ENGINE = torch.autograd.graph.__file__
_LIBRARY = f"{Path(os.__file__).parent}/"
_ASLEEP = 2.0  # seconds without the main thread using the processor
_AGAIN = 1.0  # seconds after which a call that may have been dropped is made again
_REST = 0.1  # seconds that other threads have to come to rest, while the GIL is kept


class NotNow(Exception):  # noqa: N818  it is no error
    """Other threads do not rest: the work is to be tried again."""


@contextmanager
def at_rest(skip: list[Any]) -> Iterator[_C.References]:
    """A look while no other thread of Python's runs anything. Raises NotNow if they do.

    Variables of libraries in the middle of something are no holders where there are others.
    """
    references = _C.References(skip, _library_files())
    if not references.enter_at_rest(_REST, _ENGINE, _LIBRARY):
        raise NotNow
    try:
        yield references
    finally:
        references.__exit__()


def in_backward() -> bool:
    """Whether any thread, this one included, is inside autograd's engine."""
    return any(map(_is_in_backward, sys._current_frames().values()))


def _is_in_backward(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None:
        if frame.f_code.co_filename == _ENGINE:
            return True
        frame = frame.f_back
    return False


def _library_files() -> list[str]:
    """The files of libraries that have frames running now, as the frames name them."""
    out: dict[int, str] = {}
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            out[id(frame.f_code.co_filename)] = frame.f_code.co_filename
            frame = frame.f_back
    return [file for file in out.values() if is_library(file)]


class MainThread:
    """Whether the main thread sleeps: it waits for something, and runs no code of any kind."""

    def __init__(self) -> None:
        """Begins to look at it."""
        self._stat = Path(f"/proc/self/task/{os.getpid()}/stat")
        self._used = ""
        self._since = time.monotonic()

    def sleeps(self) -> bool:
        """Whether it has for a while. To be asked now and then."""
        # pid (name) state … and, as the 14th and 15th field, the time it used.
        fields = self._stat.read_text().rpartition(")")[2].split()
        used = " ".join(fields[11:13]) if fields[0] in "SD" else ""
        if not used or used != self._used:
            self._used, self._since = used, time.monotonic()
        return time.monotonic() - self._since > _ASLEEP


class Job:
    """Work that is done once, at a safe moment.

    Attributes:
        done: Set when it was done or has failed.
        error: Why it failed, in words.
        seconds: How long it took, during which the program stood still.
    """

    def __init__(
        self, work: Callable[[], None], is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Nothing happens until it is posted or run.

        Args:
            work: What is to be done.
            is_ready: Whether it may be, as far as who asks for it knows.
        """
        self._work = work
        self._is_ready = is_ready
        self._taken = threading.Lock()  # for good, by whoever does it or gives it up
        self._posted: float | None = None
        self.done = threading.Event()
        self.error = ""
        self.seconds = 0.0

    def post(self) -> None:
        """Asks the main thread to do it, unless it was just asked."""
        now = time.monotonic()
        if self._posted is None or now - self._posted > _AGAIN:
            self._posted = now
            _C.call_on_main_thread(self._on_main_thread)

    @property
    def is_taken(self) -> bool:
        """Whether it is being done, was, or was given up."""
        return self._taken.locked()

    def give_up(self) -> bool:
        """Whether it will not be done: False if it is, or was."""
        return self._taken.acquire(blocking=False)

    def run_if_safe(self) -> None:
        """Does it here and now, unless other threads are in the way."""
        if self.done.is_set() or in_backward() or not self._is_ready():
            return
        if not self._taken.acquire(blocking=False):
            return
        began = time.perf_counter()
        try:
            self._work()
        except NotNow:
            self._taken.release()
            return
        except TenureError as error:
            self.error = str(error)
        except BaseException as error:
            self.error = f"{type(error).__name__} at {_place(error.__traceback__)}"
            if _is_the_programs(error):
                self._end(began)
                raise
        self._end(began)

    def _end(self, began: float) -> None:
        self.seconds = time.perf_counter() - began
        self.done.set()

    def _on_main_thread(self) -> None:
        self._posted = None
        self.run_if_safe()


def _place(trace: TracebackType | None) -> str:
    """The innermost line. No text of the exception's, which may tell the program's data."""
    where = ""
    while trace is not None:
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where


def _is_the_programs(error: BaseException) -> bool:
    """Ctrl-C, or what a signal's handler raised: it runs between any two bytecodes, ours too."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return not isinstance(error, Exception) or _is_of_a_handler(error.__traceback__)


def _is_of_a_handler(trace: TracebackType | None) -> bool:
    handlers = {getattr(signal.getsignal(s), "__code__", None) for s in signal.valid_signals()}
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False
