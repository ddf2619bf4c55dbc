"""`tenure attach`: asks the agent of a running process, and shows what it says.

Imports nothing of torch: the work is done in the other process.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tenure.errors import InputError
from tenure.inspect import processes, verdicts
from tenure.inspect.agent import AgentError, Line, peer_of
from tenure.inspect.files import whole
from tenure.inspect.options import Options, say
from tenure.inspect.words import many, plain

__all__ = ["Request", "once", "watch"]

_OUR_PART = 5.0  # seconds beyond what the agent may take
_ENDING = 2.0  # seconds from when a process closes its connections until it is gone
_LEFT_BEHIND = (
    "not known: which lines and steps made what is alive now, and what only C++ code holds of it; "
    "who holds it needs no history"
)
_BY_ITSELF = (
    "not known: the births of what is alive now, so that what grew before is not told from what "
    "was always there; who holds it needs no history"
)


@dataclass(frozen=True)
class Request:
    """What is wanted of a process.

    Attributes:
        pid: The process, as it was typed.
        options: How to watch it; with ``out`` it records.
        json: File for what was found; empty: none.
        seconds: How long to watch; 0: until Ctrl-C, or the program's end.
        steps: How many steps to watch; 0: any number.
        max_pause: Seconds that the program may stand still.
        timeout: Seconds to wait for a moment at which it can be looked at.
    """

    pid: str
    options: Options = field(default_factory=Options)
    json: str = ""
    seconds: float = 0.0
    steps: int = 0
    max_pause: float = 10.0
    timeout: float = 15.0


def once(request: Request) -> int:
    """Takes one look and prints who holds what is alive; returns the exit status."""
    _check_file(request.json)
    with _attached(request, _LEFT_BEHIND) as client:
        client.ask("look")
        answer = client.until("look")
    print(plain(look_text(answer["look"])))
    say(f"process {client.pid} stood still for {answer['look']['pause']:.2f} s")
    _write(request.json, answer["written"])
    return 0


def watch(request: Request) -> int:
    """Watches until it is enough and prints the verdict; returns the exit status."""
    _check_file(request.json)
    if request.options.out:
        from tenure.inspect.launch import prepared

        run = replace(prepared(request.options), run=secrets.token_hex(8))
        request = replace(request, options=run)
    with _attached(request, _BY_ITSELF) as client:
        client.ask("watch")
        try:
            begun = client.until("watching")["watching"]
            say(f"watching since now, after a pause of {begun['pause']:.2f} s; Ctrl-C detaches")
            answer = _follow(client, request)
        except KeyboardInterrupt:
            answer = _detach(client)
    verdict = answer["verdict"]
    if answer["ended"]:
        say(f"{answer['ended']} while it was watched")
    print(plain(verdicts.first_screen(verdict)))
    if answer["recording"]:
        folder = verdicts.shown_path(Path(answer["recording"]).parent)
        say(f"recorded in {folder}: `tenure why {folder}` says more")
    _write(request.json, answer["written"])
    return verdicts.CODES[verdict["verdict"]]


def _follow(client: _Client, request: Request) -> dict[str, Any]:
    """The last message: the verdict."""
    until = time.monotonic() + request.seconds if request.seconds else float("inf")
    shown = _StatusLine()
    with shown:
        while True:
            left = until - time.monotonic()
            message = client.next(min(left, client.patience)) if left > 0 else None
            if message is None and left > client.patience:
                raise InputError(client.silence())
            if message is None:
                break
            if "verdict" in message:
                return message
            status = message.get("status")
            if status is not None:
                shown.show(status)
                if request.steps and status["steps"] >= request.steps:
                    break
    client.ask("detach")
    return client.until("verdict")


def _detach(client: _Client) -> dict[str, Any]:
    """After Ctrl-C; after another one the process is left to itself, which detaches as well."""
    say("detaching")
    client.ask("detach")
    return client.until("verdict")


class _Client:
    """The connection to an agent."""

    def __init__(self, pid: int, connection: socket.socket, request: Request) -> None:
        self.pid = pid
        self._line = Line(connection)
        self._request = request
        self.patience = request.timeout

    def greet(self) -> dict[str, Any]:
        self.ask("hello")
        hello = self.until("torch")
        # While the program stands still, its agent does, too.
        self.patience = self._request.timeout + _OUR_PART + 5 * hello["pause"]
        return hello

    def ask(self, what: str) -> None:
        options = self._request.options.text()
        asked = {"ask": what, "options": options, "patience": self._request.timeout}
        try:
            self._line.send(asked)
        except OSError:
            self.next(_OUR_PART)  # who is sent away is told why
            raise InputError(self._gone()) from None

    def until(self, key: str) -> dict[str, Any]:
        """The next message that has it; what comes before is shown."""
        while True:
            message = self.next(self.patience)
            if message is None:
                raise InputError(self.silence())
            if key in message:
                return message
            if "waits" in message:
                say(f"waiting: {message['waits']}")

    def next(self, seconds: float) -> dict[str, Any] | None:
        try:
            message = self._line.receive(seconds)
        except (EOFError, OSError):
            raise InputError(self._gone()) from None
        except AgentError as error:
            raise InputError(f"process {self.pid} gave no answer to be understood") from error
        if message is not None and "error" in message:
            raise InputError(str(message["error"]))
        if message is not None and "said" in message:
            say(str(message["said"]))
        return message

    def silence(self) -> str:
        return (
            f"process {self.pid} does not answer: {processes.state_of(self.pid)}; try again, or "
            "give --timeout more seconds"
        )

    def _gone(self) -> str:
        until = time.monotonic() + _ENDING
        while processes.is_alive(self.pid) and time.monotonic() < until:
            time.sleep(0.02)
        if processes.is_alive(self.pid):
            return f"process {self.pid} closed the connection: try again"
        return f"process {self.pid} was killed or ended meanwhile: there is no verdict"


@contextmanager
def _attached(request: Request, unknown: str) -> Iterator[_Client]:
    """A connection whose agent was asked what it will cost, which is said before anything is."""
    pid = processes.parsed(request.pid)
    with _connected(pid, request.timeout) as connection:
        client = _Client(pid, connection, request)
        hello = client.greet()
        if hello["torch"] != "yes":
            what = "has not imported torch" if hello["torch"] == "no" else "is importing torch"
            raise InputError(f"process {pid} {what}: attach once it has")
        if hello["pause"] > request.max_pause:
            raise InputError(
                f"process {pid} would stand still for about {hello['pause']:.0f} s, more than "
                f"{request.max_pause:g} s: give --max-pause more seconds to allow it"
            )
        rank = f" (rank {hello['rank']})" if hello["rank"] is not None else ""
        say(
            f"process {pid}{rank} will stand still for about {max(0.1, hello['pause']):.1f} s: "
            f"Python has {hello['blocks']:,} blocks of memory in use there"
        )
        say(unknown)
        yield client


@contextmanager
def _connected(pid: int, timeout: float) -> Iterator[socket.socket]:
    path = processes.socket_of(pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            raise InputError(
                f"process {pid} has no agent any more, and its left-over socket was removed: start "
                "it with `tenure run --agent`"
            ) from None
        except TimeoutError:
            raise InputError(
                f"process {pid} does not answer: {processes.state_of(pid)}; try again"
            ) from None
        except OSError as error:
            raise InputError(f"process {pid} cannot be reached at {path}: {error}") from None
        found, uid = peer_of(connection)
        if found != pid or uid != os.geteuid():
            raise InputError(
                f"{path} is not process {pid}'s: in a container, attach from inside it"
            )
        yield connection


def look_text(look: dict[str, Any]) -> str:
    """A look as a person reads it, the largest first."""
    alive = many(look["storages"], "storage")
    share = f"{100 * look['explained']:.1f} % of it explained"
    lines = [f"{_size(look['bytes'])} alive in {alive}, {share}"]
    for held in look["held"][:_MOST]:
        count = many(held["count"], "storage")
        lines.append(f"{_size(held['bytes']):>12}  {held['text']}, {count}")
        if len(held["path"]) > 1:
            way = " → ".join(hop["text"] for hop in held["path"][1:])
            lines.append(f"{'':>12}    the largest: → {way}")
    if len(look["held"]) > _MOST:
        rest = look["held"][_MOST:]
        nbytes = sum(held["bytes"] for held in rest)
        lines.append(f"{_size(nbytes):>12}  {many(len(rest), 'more holder')}; --json has them")
    for cycle in look["cycles"][:_MOST]:
        free = "Python's collector frees them" if cycle["collectable"] else "nothing frees them"
        shown = f"{many(cycle['count'], 'cycle')}, {free}: {cycle['text']}"
        lines.append(f"{_size(cycle['bytes']):>12}  {shown}")
    if look["residue"]:
        lines.append(f"{_size(look['residue']):>12}  held from C++ code alone")
    for device, bytes_ in look["devices"].items():
        if "allocated" in bytes_:
            given = _size(bytes_["allocated"])
            lines.append(f"{device}: {_size(bytes_['found'])} found of {given} allocated")
    lines.append(f"{_size(look['rss'])} of the process are resident")
    return "\n".join(lines)


_MOST = 12


class _StatusLine:
    """One line on stderr that changes; where that is no terminal, a line for each new verdict."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._kind = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, status: dict[str, Any]) -> None:
        kind = status["verdict"]
        unit = status["unit"]
        text = (
            f"{many(status['steps'], unit)} watched, at {unit} {status['last']:,} · "
            f"{_size(status['held'])} held · {kind.replace('-', ' ')} so far"
        )
        if kind in {"leak", "growth"}:
            text += f", {_size(status['bytes_per_step'])}/{unit}"
        if self._live:
            print(f"\r\x1b[Ktenure: {text}", end="", file=sys.stderr, flush=True)
        elif kind != self._kind:
            say(text)
        self._kind = kind


def _check_file(path: str) -> None:
    """Before the program stands still for what could not be kept."""
    if not path:
        return
    file = Path(path).absolute()
    if file.is_dir():
        raise InputError(f"cannot write {path}: it is a folder: give --json a file")
    if not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"cannot write {path}: give --json a file in a folder that is there")


def _write(path: str, document: dict[str, Any]) -> None:
    if not path:
        return
    try:
        with whole(Path(path)) as file:
            file.write(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot write {path}: {error}") from None


def _size(nbytes: float) -> str:
    if abs(nbytes) >= 1e9:
        return f"{nbytes / 1e9:,.2f} GB"
    return f"{nbytes / 1e6:,.1f} MB" if abs(nbytes) >= 5e4 else f"{nbytes / 1e3:,.1f} kB"
