"""Calls an alert's function, which may be slow, fail or hang, without ever waiting for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from tenure.telemetry.alerts import Broken

__all__ = ["Caller"]

_log = logging.getLogger("tenure.telemetry")
_MOST = 64  # calls that wait for the one under way


class Caller:
    """One function, with a thread and a bounded queue of its own.

    Whatever it does, rules, sinks and training go on: what it raises is logged, and alerts that
    find the queue full are lost, with one warning. The thread is a daemon: a function that hangs
    must not keep a program from ending.
    """

    def __init__(self, function: Callable[[Broken], None]) -> None:
        """Starts the thread."""
        self._function = function
        self._waiting: queue.Queue[Broken | None] = queue.Queue(_MOST)
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="tenure-alert", daemon=True)
        self._thread.start()

    def call(self, what: Broken) -> None:
        """Has it called with this, by and by."""
        try:
            self._waiting.put_nowait(what)
        except queue.Full:
            if not self._is_told:
                self._is_told = True
                _log.warning(
                    "an alert's function is slow or hangs: %d calls wait for it, and alerts that "
                    "come meanwhile do not reach it. Training goes on",
                    _MOST,
                )

    def end(self) -> None:
        """No more calls come."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def wait(self, timeout: float) -> None:
        """Until it was called for all, so many seconds at most; in the function itself: not."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while (what := self._waiting.get()) is not None:
            try:
                self._function(what)
            except BaseException:  # noqa: BLE001  a user's, SystemExit too; training goes on
                _log.exception("an alert's function failed")
