"""Processes that `tenure attach` may be given: whether they are there, whose, and with an agent."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from urllib.parse import parse_qsl

from tenure.errors import InputError
from tenure.inspect.agent import places, socket_in
from tenure.inspect.options import AGENT, VARIABLE

__all__ = ["is_alive", "parsed", "socket_of", "state_of", "with_agent"]


def parsed(text: str) -> int:
    """The process that was typed; raises InputError with a sentence."""
    if text.isascii() and text.isdigit() and 0 < int(text) < 2**31:
        return int(text)
    if not text:
        raise InputError(f"which process? {_those()}")
    raise InputError(f"'{text[:64]}' is no process: give its PID, a number; {_those()}")


def _those() -> str:
    found = with_agent()
    if not found:
        return "none of yours has an agent: start one with `tenure run --agent train.py`"
    return f"those with an agent are {', '.join(map(str, found))}"


def with_agent() -> list[int]:
    """Processes of this user's that have an agent."""
    names = [path.stem for folder in _folders() for path in folder.glob("agent-*.sock")]
    numbers = {name.removeprefix("agent-") for name in names}
    return sorted(int(number) for number in numbers if number.isdigit() and is_alive(int(number)))


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return _state(pid) not in {"", "Z", "X"}


def state_of(pid: int) -> str:
    """Why a process may not answer, in words."""
    state = _state(pid)
    if state in {"", "Z", "X"}:
        return "it has ended"
    if state in {"T", "t"}:
        return f"it is stopped, and goes on after `kill -CONT {pid}`"
    return "it is in a call that lets no other thread of Python's run"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def socket_of(pid: int) -> Path:
    """The socket of its agent; raises InputError, in a sentence, if there is none to talk to."""
    found = [socket_in(folder, pid) for folder in _folders()]
    path = next((path for path in found if path.is_socket()), None)
    if not is_alive(pid):
        if path is not None:
            path.unlink(missing_ok=True)
            raise InputError(
                f"process {pid} has ended; the socket that its agent left behind was removed"
            )
        raise InputError(
            f"there is no process {pid}: give the PID of one that runs; to one in a container, "
            "attach from inside it"
        )
    _check_owner(pid)
    if path is None:
        raise InputError(_why_none(pid))
    return path


def _folders() -> list[Path]:
    """Where to look: the process's XDG_RUNTIME_DIR need not be this one's."""
    own = [*places(), Path(f"/run/user/{os.geteuid()}/tenure")]
    return [folder for folder in dict.fromkeys(own) if _is_ours(folder)]


def _is_ours(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _check_owner(pid: int) -> None:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return
    if uid != os.geteuid():
        name = _name_of(uid)
        raise InputError(
            f"process {pid} is user {name}'s, and only its own user may attach: run "
            f"`sudo -u {name} tenure attach {pid}`"
        )


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _why_none(pid: int) -> str:
    setting = _setting(pid)
    if setting and setting != AGENT:
        out = dict(parse_qsl(setting)).get("out", "RUN")
        return f"process {pid} is watched by `tenure run` already: see `tenure why {out}`"
    if setting == AGENT:
        return (
            f"process {pid} has no agent, though {VARIABLE}={AGENT} is set: it is no Python, was "
            "forked and not started anew, or has a PYTHONPATH without the start-up hook"
        )
    return (
        f"process {pid} has no agent, and nothing is injected into a running process: start it "
        "with `tenure run --agent`, or with the variables of `tenure env --agent`"
    )


def _setting(pid: int) -> str:
    """What the process was started with as ``TENURE``; of its other variables nothing is kept."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{VARIABLE}=".encode()
    found = [v.removeprefix(prefix) for v in variables if v.startswith(prefix)]
    return found[0].decode(errors="replace") if found else ""
