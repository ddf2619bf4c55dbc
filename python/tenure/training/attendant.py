"""Attendant: what the process that has started ranks does for them while they run."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from tenure.inspect.options import say
from tenure.training import failures

__all__ = ["Attendant"]

_EVERY = 0.2  # seconds
_ENDING = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1)


class Attendant:
    """Says what ranks leave to be said, and wakes those that sleep through their end.

    A process that is stopped (SIGSTOP) does not obey SIGTERM or SIGINT before it is continued, and
    the launcher would wait half a minute for it: once it is asked to end, it is continued.

    Attributes:
        woken: The process ids of ranks that were stopped when they were asked to end.
    """

    def __init__(self, logs: Path) -> None:
        """Begins when it is entered."""
        self.woken: set[int] = set()
        self._logs = logs
        self._stopped: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="tenure-attendant")

    def __enter__(self) -> Self:
        """Begins."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends, when all is said."""
        self._over.set()
        self._thread.join()

    def _attend(self) -> None:
        while not self._over.wait(_EVERY):
            self._wake()
            self._tell()
        self._tell()

    def _tell(self) -> None:
        for text in failures.take_remarks(self._logs):
            say(text)

    def _wake(self) -> None:
        with suppress(ChildProcessError):  # there are none yet, or no more
            while (found := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG)) is not None:
                self._stopped.add(found.si_pid)
        for pid in list(self._stopped):
            status = _status(pid)
            if not status.get("State", "").startswith("T"):
                self._stopped.discard(pid)
            elif int(status["ShdPnd"], 16) & _ENDING:
                self.woken.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def _status(pid: int) -> dict[str, str]:
    """Of a process, as the system tells it; of one that is gone, nothing."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
