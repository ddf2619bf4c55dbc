"""Lock: one run at a time writes to a folder. The system lets go of it with the process."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

__all__ = ["Lock", "holder_of"]


class Lock:
    """A file that this process has locked, and that says so; gone when it is let go.

    Where the file system knows no locks there is only the file.
    """

    def __init__(self, path: Path) -> None:
        """Takes it. Raises BlockingIOError if another process has it."""
        self._path = path
        while True:
            self._file = path.open("a+")
            try:
                _lock(self._file.fileno())
            except BlockingIOError:
                self._file.close()
                raise
            if _is_at(path, self._file.fileno()):
                break
            self._file.close()  # who had it has removed it meanwhile
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def __enter__(self) -> Self:
        """Has it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets it go."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def holder_of(path: Path) -> str:
    """The process that has the lock; empty if none has. Changes nothing."""
    with suppress(OSError), path.open() as file:
        try:
            _lock(file.fileno(), fcntl.LOCK_SH)
        except BlockingIOError:
            return file.read().strip() or "which has just begun"
    return ""


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # not every network file system has locks
        return


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
