"""What sets a flight recorder off from within Python: uncaught exceptions, and CUDA's allocator."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType

import torch

__all__ = ["Hooks", "observe_cuda"]

_observed = False  # an observer cannot be taken away again: one for the process, for good
_tell: Callable[[int, int, int], None] | None = None


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

    def remove(self) -> None:
        """Puts back what was there; under hooks that others put over ours, ours is quiet."""
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
