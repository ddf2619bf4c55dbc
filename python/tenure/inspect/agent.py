"""The idle agent: all that a process started with ``TENURE=agent`` has until someone attaches.

One thread that waits in accept() on a socket of this user's. Nothing is imported, patched or
watched before a client asks for it; what it may ask for is in ``attached``, and the client in
``attach``. A forked child has no agent; a process that starts anew has one of its own.

The start-up hook runs this file by itself, so nothing of Tenure's is imported at the top.

Note [What is said on the socket]
One JSON object a line, each with ``"tenure": PROTOCOL``. First the client says ``{"ask": "hello"}``
and learns who answers and how long a look would take. Then it asks for one of

- ``look``: ``{"waits": why}`` until it is done, then ``{"look": …}``;
- ``watch``: the same, then ``{"watching": …}``, and until the client asks to ``detach`` a
  ``{"status": …}`` now and then and ``{"said": …}`` for what would have gone to stderr. At the end
  ``{"verdict": …}``. A client that leaves has detached.

At any time ``{"error": sentence}`` may come instead, and is the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["PROTOCOL", "Agent", "AgentError", "Line", "begin", "peer_of", "places", "socket_in"]

PROTOCOL = 1
_LONGEST = 64 << 20  # bytes of one message
_SILENCE = 15.0  # seconds that a client may say nothing before it has said what it wants
_SENDING = 5.0  # seconds that a client may read nothing
_PACE = 0.35e-6  # seconds of a look for each block of memory that Python has in use …
_LOOP = 2.3e-3  # … where 100,000 numbers are summed up in so many
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class AgentError(Exception):
    """What the client is told in one sentence."""


def places() -> list[Path]:
    """Folders where a user's agents have their sockets, the preferred one first."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [Path(given) / "tenure"] if given.startswith("/") else []
    return [*own, Path(f"/tmp/tenure-{os.geteuid()}")]


def socket_in(folder: Path, pid: int) -> Path:
    """The socket of a process's agent."""
    return folder / f"agent-{pid}.sock"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user; the kernel says so."""
    import struct

    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", found)
    return pid, uid


class Line:
    """Messages over a connection. For one thread."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes the connection, which stays the caller's to close."""
        self._connection = connection
        self._heard = b""

    def fileno(self) -> int:
        """For poll()."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError if the other end is gone or reads nothing."""
        import json

        text = json.dumps({"tenure": PROTOCOL, **message}) + "\n"
        # A program may have made SIGPIPE deadly.
        left = memoryview(text.encode())
        self._connection.settimeout(_SENDING)
        while left:
            left = left[self._connection.send(left, socket.MSG_NOSIGNAL) :]

    def fill(self) -> None:
        """Reads what has come. Raises EOFError at the end, OSError if there is too much."""
        heard = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        if not heard:
            raise EOFError
        self._heard += heard
        if len(self._heard) > _LONGEST:
            raise OSError("a message is too long")

    def next(self) -> dict[str, Any] | None:
        """The next message that has come. Raises AgentError for what is none."""
        import json

        if b"\n" not in self._heard:
            return None
        text, _, self._heard = self._heard.partition(b"\n")
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise AgentError("that was no message of `tenure attach`")
        return message

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None if none comes in time. Raises EOFError at the end."""
        import select

        until = time.monotonic() + seconds
        while (message := self.next()) is None:
            poll = select.poll()  # not select(), which fails beyond 1024 descriptors
            poll.register(self, select.POLLIN)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1e3):
                return None
            self.fill()
        return message


class Agent:
    """The agent of this process."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        """Takes a socket that listens at this path."""
        self.pid = os.getpid()
        self._listener = listener
        self._path = path
        self._client: socket.socket | None = None
        self._client_pid = 0
        self._pace = 0.0  # seconds a block, once a look was taken
        self._thread = threading.Thread(target=self._serve, name="tenure-agent", daemon=True)

    def start(self) -> None:
        """Waits for clients from now on, until the program ends."""
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._leave_in_child)
        self._thread.start()

    def end(self) -> None:
        """The socket is gone."""
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def attend(self, line: Line, seconds: float) -> None:
        """Waits for the client, a while at most. Who else comes meanwhile is sent away."""
        import select

        poll = select.poll()
        poll.register(line, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        ready = {number for number, _ in poll.poll(seconds * 1e3)}
        if self._listener.fileno() in ready:
            self._send_away()
        if line.fileno() in ready:
            line.fill()

    def hear(self, line: Line, seconds: float) -> dict[str, Any] | None:
        """The client's next message, or None after a while."""
        until = time.monotonic() + seconds
        while (message := line.next()) is None:
            left = until - time.monotonic()
            if left < 0:
                return None
            self.attend(line, left)
        return message

    def took(self, seconds: float) -> None:
        """A look took so long: later ones will, too."""
        self._pace = max(seconds / max(1, sys.getallocatedblocks()), 1e-8)

    def _leave_in_child(self) -> None:
        """A forked child has neither the thread nor a right to the sockets."""
        self._listener.close()
        if self._client is not None:
            self._client.close()
        options = sys.modules.get("tenure.inspect.options")
        if options is not None:
            options.say_to(None)

    def _serve(self) -> None:
        while True:
            try:
                self._client, _ = self._listener.accept()
            except OSError:  # no descriptor is left, say
                time.sleep(1.0)
                continue
            with contextlib.suppress(OSError, EOFError), self._client:  # it left: so be it
                self._answer(self._client)
            self._client = None

    def _answer(self, client: socket.socket) -> None:
        line = Line(client)
        try:
            self._client_pid = self._admit(client)
            asked = self._expect(line, "hello")
            line.send(self._hello())
            asked = self._expect(line, "look", "watch")
            self._do(line, asked)
        except AgentError as error:
            line.send({"error": str(error)})
        except (OSError, EOFError):
            raise
        except Exception as error:  # noqa: BLE001  the agent goes on
            where = f"{type(error).__name__} in {Path(__file__).parent}"
            line.send({"error": f"the agent failed, which is a bug of Tenure's: {where}"})

    def _admit(self, client: socket.socket) -> int:
        pid, uid = peer_of(client)
        if uid != os.geteuid():
            raise AgentError(
                f"process {self.pid} belongs to user {os.geteuid()} and you are user {uid}: only "
                f"its own user may attach"
            )
        return pid

    def _expect(self, line: Line, *asks: str) -> dict[str, Any]:
        asked = self.hear(line, _SILENCE)
        if asked is None:
            raise AgentError("nothing was asked for")
        if asked.get("tenure") != PROTOCOL:
            raise AgentError(
                f"process {self.pid} understands version {PROTOCOL} of what `tenure attach` says, "
                f"and this is version {asked.get('tenure')}: use the `tenure` of its environment"
            )
        if asked.get("ask") not in asks:
            raise AgentError(f"process {self.pid} expects one of: {', '.join(asks)}")
        return asked

    def _hello(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        loading = bool(getattr(getattr(torch, "__spec__", None), "_initializing", False))
        ranks = [os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()]
        blocks = sys.getallocatedblocks()
        return {
            "pid": self.pid,
            "rank": int(ranks[0]) if ranks else None,
            "torch": "no" if torch is None else "loading" if loading else "yes",
            "blocks": blocks,
            "pause": blocks * (self._pace or _pace_here()),
        }

    def _do(self, line: Line, asked: dict[str, Any]) -> None:
        if "torch" not in sys.modules:
            raise AgentError(f"process {self.pid} has not imported torch")
        try:
            from tenure.inspect import attached
        except ImportError as error:
            raise AgentError(f"process {self.pid} cannot be watched: {error}") from None
        attached.do(self, line, asked)

    def _send_away(self) -> None:
        with contextlib.suppress(OSError):
            other, _ = self._listener.accept()
            with other:
                try:
                    self._admit(other)
                    by = f" by process {self._client_pid}" if self._client_pid else ""
                    why = f"process {self.pid} is attached to{by} already: try again after that"
                except AgentError as error:
                    why = str(error)
                Line(other).send({"error": why})


def _pace_here() -> float:
    """How fast a look will be on this machine, from something short that it must do as well."""
    began = time.thread_time()
    sum(range(100_000))
    return _PACE * (time.thread_time() - began) / _LOOP


_agent: Agent | None = None


def begin() -> None:
    """Starts the agent of this process. Raises OSError in one sentence if there can be none."""
    global _agent
    if _agent is not None and _agent.pid == os.getpid():
        return
    why = ""
    for folder in places():
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _make_private(folder)
            _remove_left_over(folder)
            path = _listen(listener, folder)
        except OSError as error:  # the next one, then
            listener.close()
            why = str(error)
            continue
        _agent = Agent(listener, path)
        _agent.start()
        return
    raise OSError(why)


def _make_private(folder: Path) -> None:
    """Makes the folder; raises OSError unless it is this user's and nobody else's."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{folder} is not a folder of user {os.geteuid()}: remove it")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _listen(listener: socket.socket, folder: Path) -> Path:
    path = socket_in(folder, os.getpid())
    if path.exists() and _is_left_over(path):  # of a program that this process was before exec()
        path.unlink()
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(8)
    return path


def _remove_left_over(folder: Path) -> None:
    """Sockets of processes that were killed."""
    for path in folder.glob("agent-*.sock"):
        # One in another PID namespace looks dead from here, and still answers.
        if not Path("/proc", path.stem.removeprefix("agent-")).exists() and _is_left_over(path):
            path.unlink(missing_ok=True)


def _is_left_over(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
