"""What sets a flight recorder off from within Python: uncaught exceptions, and CUDA's allocator."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType

import torch

from tenure.telemetry.snapshot import sentence

__all__ = ["Hooks", "ends_of", "observe_cuda", "uncaught", "watch_worker"]

_FIRST = 1000  # among what a worker does at its end: it still has all that it held
_observed = False  # an observer cannot be taken away again: one for the process, for good
_tell: Callable[[int, int, int], None] | None = None
_watched = 0  # the worker whose end is seen
_of_worker = ""  # of what it ends; not the error, whose frames have all that they held
_listeners: list[Callable[[BaseException], object]] = []


class Hooks:
    """Calls a function with each exception that nothing caught, after what was there is called.

    After, because a launcher may end the process while the function is at work.
    """

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        """Puts the hooks in place. `failed` must not raise."""
        self._failed = failed
        self._before = sys.excepthook
        self._before_in_thread = threading.excepthook
        sys.excepthook = self._hook
        threading.excepthook = self._hook_in_thread
        watch_worker()
        _listeners.append(self._failed)

    def remove(self) -> None:
        """Puts back what was there; under hooks that others put over ours, ours is quiet."""
        _listeners.remove(self._failed)
        self._failed = lambda _: None
        if sys.excepthook == self._hook:
            sys.excepthook = self._before
        if threading.excepthook == self._hook_in_thread:
            threading.excepthook = self._before_in_thread

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            self._before(kind, error, trace)
        finally:
            if not issubclass(kind, KeyboardInterrupt):
                self._failed(error)

    def _hook_in_thread(self, args: threading.ExceptHookArgs) -> None:
        try:
            self._before_in_thread(args)
        finally:
            if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
                self._failed(args.exc_value)


def watch_worker() -> None:
    """Sees of what this process ends, if it is one of multiprocessing's, as under mp.spawn.

    There exceptions end in multiprocessing's own code, and no excepthook is called.
    """
    global _of_worker, _watched
    if multiprocessing.parent_process() is not None and _watched != os.getpid():
        _watched, _of_worker = os.getpid(), ""
        _listeners.clear()  # a forked one has those of its parent
        Finalize(None, _worker_ends, exitpriority=_FIRST)


def _worker_ends() -> None:
    global _of_worker
    error = sys.exc_info()[1]  # it goes through the `finally` that has this called
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__  # mp.spawn exits for it
    if isinstance(error, Exception):
        _of_worker = sentence(error)
        for listener in _listeners:
            listener(error)


def uncaught() -> BaseException | None:
    """What the interpreter ends of; of what was typed at a prompt it does not end."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def ends_of() -> str:
    """What this process ends of, in a line; empty: of nothing that is known."""
    if _of_worker and _watched == os.getpid():
        return _of_worker
    error = uncaught()
    return "" if error is None else sentence(error)


def observe_cuda(tell: Callable[[int, int, int], None] | None) -> None:
    """Has it called with device, bytes asked for and bytes free when CUDA's memory has run out.

    CUDA is not woken for this: if the program does, the observer is there from then on.
    """
    global _observed, _tell
    _tell = tell
    if tell is None or _observed or not torch.cuda.is_available():
        return
    _observed = True
    torch.cuda._lazy_call(_attach)  # type: ignore[no-untyped-call]


def _attach() -> None:
    torch._C._cuda_attach_out_of_memory_observer(_out_of_memory)  # type: ignore[attr-defined]


def _out_of_memory(device: int, asked: int, _total: int, free: int) -> None:
    if _tell is not None:
        _tell(device, asked, free)
