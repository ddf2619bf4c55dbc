"""Hands each interval to sinks that may be slow, fail or hang, without ever waiting for one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from tenure.errors import InputError
from tenure.inspect.words import many
from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks.sink import Sink

__all__ = ["Feeder"]

_FAILURES = 3  # in a row
_log = logging.getLogger("tenure.telemetry")


class Feeder:
    """Sinks, each with a thread and a bounded queue of its own.

    - A sink that is slower than the intervals come loses those that find its queue full.
    - A sink whose `write` raises loses that interval; after 3 in a row it is dropped.
    - A sink that cannot be opened is dropped.
    - A sink whose `open` or one `write` takes longer than `patience` is dropped.

    Whatever befalls one, others and the program go on. Each sink gets at most one warning (logger
    ``tenure.telemetry``): when it is dropped, or when it has written one interval and lost others.
    `dropped` counts them.

    The threads are daemons: Python waits at exit for all others, and a client that hangs must not
    keep a program from ending that has trained to its end. So `close` is what waits, with a limit.

    `feed`, `close` and the properties may be called from any thread. A forked child has none of the
    threads: there `feed` and `close` do nothing.
    """

    def __init__(self, sinks: Iterable[Sink], *, queue: int = 64, patience: float = 120.0) -> None:
        """Starts the threads; each opens its sink.

        Args:
            sinks: As `tenure.telemetry.sinks.made` gives them.
            queue: How many intervals wait for a slow sink.
            patience: How many seconds a sink may take to open or to write one interval.

        Raises:
            InputError: For a queue or a patience that is not more than 0.
        """
        if queue < 1 or not patience > 0:
            raise InputError(
                f"a queue of {queue} and a patience of {patience} s: both must be more than 0"
            )
        self._pid = os.getpid()
        self._lines = [_Line(sink, queue, patience) for sink in sinks]

    def feed(self, figures: Figures) -> None:
        """Gives the interval to every sink's queue. Never waits for one."""
        if os.getpid() != self._pid:
            return
        for line in self._lines:
            line.feed(figures)

    @property
    def dropped(self) -> int:
        """Intervals that sinks did not get so far, added up over the sinks."""
        return sum(line.lost for line in self._lines)

    @property
    def sinks(self) -> tuple[str, ...]:
        """The names of those that have not been dropped."""
        return tuple(line.name for line in self._lines if not line.is_dropped)

    def close(self, timeout: float = 30.0) -> None:
        """Lets sinks write what waits for them, closes them, and takes at most `timeout` seconds.

        What is not written by then is lost, and counted. Closing twice does nothing.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.wait(max(0.0, deadline - time.monotonic()))


class _Line:
    """One sink, its thread and its queue. Only that thread touches the sink."""

    def __init__(self, sink: Sink, queue: int, patience: float) -> None:
        self.name = str(sink.name)
        self._sink = sink
        self._limit = queue
        self._patience = patience
        self._changed = threading.Condition()  # guards all below; never held while a sink works
        self.lost = 0
        self.is_dropped = False
        self._waiting: deque[Figures] = deque()
        self._is_ending = False
        self._is_writing = False
        self._busy_since: float | None = None
        self._is_hung = False
        self._is_told = False
        self._thread = threading.Thread(
            target=self._run, name=f"tenure-sink-{self.name}", daemon=True
        )
        self._thread.start()

    def feed(self, figures: Figures) -> None:
        with self._changed:
            if self._is_ending:
                return
            since = self._busy_since
            self._is_hung = since is not None and time.monotonic() - since > self._patience
            if not (self.is_dropped or self._is_hung) and len(self._waiting) < self._limit:
                self._waiting.append(figures)
                self._changed.notify()
                return
            self.lost += 1
        if self._is_hung:
            self._drop(f"one call takes longer than {self._patience:g} s")

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def wait(self, timeout: float) -> None:
        if self._thread is threading.current_thread():
            return  # the sink itself asks: it is closed when it returns
        if not self._is_hung:
            self._thread.join(timeout)
            if self._thread.is_alive():
                self._is_hung = True
                self._drop("it did not end in time")
        if self.lost:
            self._tell_lost()

    def _run(self) -> None:
        """The thread: opens, writes until the end or until dropped, closes."""
        if (error := self._do(self._sink.open)) is None:
            self._write_all()
        else:
            self._drop(f"it cannot be opened ({_said(error)})")
        # Also after a failure: what a sink has opened by then is given back.
        if (error := self._do(self._sink.close)) is not None:
            self._tell(f"cannot be closed ({_said(error)}): its last intervals may be lost")

    def _write_all(self) -> None:
        failures = 0
        while (figures := self._next()) is not None:
            error = self._do(partial(self._sink.write, figures))
            with self._changed:
                self._is_writing = False
                # A write that was given up has been counted.
                self.lost += error is not None and not self.is_dropped
                loses = self.lost > 0 and error is None and not self.is_dropped
            if loses:
                self._tell_lost()
            failures = 0 if error is None else failures + 1
            if error is not None and failures == _FAILURES:
                self._drop(f"it failed {failures} times in a row ({_said(error)})")

    def _next(self) -> Figures | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending or self.is_dropped)
            self._is_writing = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _do(self, call: Callable[[], object]) -> BaseException | None:
        with self._changed:
            self._busy_since = time.monotonic()
        try:
            call()
        except BaseException as error:  # noqa: BLE001  clients raise anything, SystemExit too
            return error
        finally:
            with self._changed:
                self._busy_since = None
        return None

    def _drop(self, why: str) -> None:
        with self._changed:
            if self.is_dropped:
                return
            self.is_dropped = True
            self.lost += len(self._waiting) + self._is_writing
            self._waiting.clear()
            self._changed.notify()
        self._tell(f"is dropped: {why}. Intervals lost: {self.lost:,}")

    def _tell_lost(self) -> None:
        self._tell(f"lost {many(self.lost, 'interval')}: it is slow, or fails at times")

    def _tell(self, what: str) -> None:
        with self._changed:
            is_told, self._is_told = self._is_told, True
        if not is_told:
            _log.warning("the sink %s %s. Training goes on", self.name, what)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
