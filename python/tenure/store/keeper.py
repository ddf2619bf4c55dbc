"""The keeper: a process that has objects for processes that end.

A keeper is a member of the job with the role ``keeper``. Another process of its host puts an object
for it alone and says, over a socket of the keeper's, under which terms others may fetch it; the
keeper fetches it, which frees it there, and answers with a handle of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tenure import _C
from tenure.errors import AccessRefused, InputError, OwnerLost, StoreTimeout, TenureError
from tenure.store import collectors as who
from tenure.store import joining
from tenure.store.handles import Handle

ROLE = "keeper"
_SOCKET = "keeper.control"
_MOST_BYTES = 1 << 20
_PATIENCE_S = 30.0
_PAUSE_S = 0.1  # until a visitor who could not be let in is tried again


class Keeper:
    """Takes what others of this host give it. Ends with `close`."""

    def __init__(self) -> None:
        """Listens when it returns. The process has joined as a keeper."""
        store = joining.current()
        self._store = store
        self._path = _path(store.job)
        with contextlib.suppress(FileNotFoundError):
            if _answers(self._path):
                raise InputError(f"the job '{store.job}' has a keeper on this host already")
            self._path.unlink()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self._path))
        self._path.chmod(0o600)
        self._listening.listen(64)
        self._closed = threading.Event()
        self._visits: list[tuple[threading.Thread, socket.socket]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no longer; what it has stays until the process leaves the store."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for thread, connection in self._visits:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # who was heard is answered
            thread.join()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
                visit = threading.Thread(target=self._visit, args=[connection], daemon=True)
                self._visits = [one for one in self._visits if one[0].is_alive()]
                visit.start()
            except (OSError, RuntimeError):  # closed, or without descriptors or threads for now
                self._closed.wait(_PAUSE_S)
            else:
                self._visits.append((visit, connection))

    def _visit(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            if _user_of(connection) == os.geteuid():
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            taken = self._take(_receive(connection))
        except Exception as error:  # noqa: BLE001  whatever it is, the visitor is told
            _send(connection, {"error": str(error)})
            return
        try:
            _send(connection, {"handle": taken.text()})
        except OSError:  # the visitor has gone, and nobody else can ask for it
            self._store.free([taken._handle])

    def _take(self, asked: dict[str, Any]) -> Handle:
        handle = Handle.from_text(asked["handle"])
        listed = asked["listed"]
        if listed is not None:
            listed = [(role, rank) for role, rank in listed]
        tensor = handle.get()
        count, site = asked["count"], asked["site"]
        return Handle(self._store.put(*handle.scope, tensor, listed, count, "", None, site))


def give(
    store: _C.Store, put: Callable[..., _C.StoreHandle], collectors: who.Collectors, site: str
) -> Handle:
    """Has the host's keeper take what `put` stores for it, and returns the keeper's handle."""
    listed, count = who.parse(collectors)
    mine = Handle(put([(ROLE, None)], None))
    if not mine.stored:
        return mine
    asked = {"handle": mine.text(), "listed": listed, "count": count, "site": site}
    path = _path(store.job)
    try:
        with _connected(path) as connection:
            _send(connection, asked)
            answer = _receive(connection)
    except AccessRefused:
        store.free([mine._handle])
        raise
    except TimeoutError:
        store.free([mine._handle])
        raise StoreTimeout(f"the keeper of the job '{store.job}' does not answer") from None
    except (OSError, EOFError):
        store.free([mine._handle])
        raise OwnerLost(
            f"the job '{store.job}' has no keeper on this host: start one with `tenure store serve "
            f"--job {store.job}`"
        ) from None
    if "error" in answer:
        store.free([mine._handle])
        raise TenureError(f"the keeper could not take {mine}: {answer['error']}")
    return Handle.from_text(answer["handle"])


def _path(job: str) -> Path:
    return Path(_C.store_folder(job)) / _SOCKET


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE_S)
        connection.connect(str(path))
        if _user_of(connection) != os.geteuid():
            raise AccessRefused(f"what listens at {path} is of another user")
        yield connection


def _answers(path: Path) -> bool:
    """Whether somebody listens there; raises FileNotFoundError if there is no such socket."""
    try:
        with _connected(path):
            return True
    except ConnectionRefusedError:
        return False


def _user_of(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON; ValueError or TypeError for anything else, EOFError if nothing comes."""
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(65_536)
        if not piece:
            raise EOFError("the connection ended")
        data += piece
        if len(data) > _MOST_BYTES:
            raise ValueError("the message is too long")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise TypeError("the message is no object")
    return message
