"""What `tenure attach` cannot do, it says in one sentence, and never hangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from attaching import Program, attach, clients, running, runtime_folder
from tenure.inspect import agent

NOBODY = 65534
WAITS = "import torch, time\nshelf = torch.zeros(1 << 20)\nprint('ready', flush=True)\n"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[Path]:
    with runtime_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[Program]:
    del runtime
    text = WAITS + "while True: time.sleep(0.01)\n"
    with running(tmp_path_factory.mktemp("waits"), text) as started:
        yield started


def refusal(*arguments: object) -> str:
    """The one sentence."""
    ended = attach(*arguments)
    assert ended.returncode == 2, ended
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "will stand still" not in line]
    lines = [line for line in lines if "not known" not in line and "waiting: " not in line]
    (line,) = lines
    return line


def wait_until(there: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not there():
        assert time.monotonic() < until
        time.sleep(0.005)


def has_socket(pid: int) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if str(link.readlink()).startswith("socket:"):
                return True
    return False


def test_no_number() -> None:
    assert "'train.py' is no process: give its PID, a number" in refusal("train.py")
    assert "'-1'" in attach("--", "-1").stderr
    assert "is no process" in refusal("9" * 30)


def test_no_pid_lists_those_there_are(program: Program) -> None:
    # Other tests may have some, too.
    assert re.search(rf"which process\? those with an agent are .*\b{program.pid}\b", refusal())


def test_no_such_process() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert f"there is no process {gone.pid}" in refusal(gone.pid)


def test_a_process_without_an_agent() -> None:
    assert "start it with `tenure run --agent`" in refusal(os.getpid())


def test_a_process_that_tenure_run_watches(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('ready', flush=True); input()")
    with subprocess.Popen(
        [sys.executable, "-m", "tenure", "run", "--quiet", "job.py"],
        cwd=tmp_path, stdin=-1, stdout=-1, text=True,
    ) as watched:  # fmt: skip
        assert watched.stdout is not None
        watched.stdout.readline()
        said = refusal(watched.pid)
        assert "is watched by `tenure run` already: see `tenure why" in said
        assert str(tmp_path / "run.tenure") in said
        watched.communicate("\n")


def test_options_that_contradict_each_other(program: Program, tmp_path: Path) -> None:
    assert "--once takes one look and leaves" in refusal(program.pid, "--once", "--steps", 3)
    assert "cannot write" in refusal(program.pid, "--once", "--json", "/nowhere/look.json")
    for how in (["--once"], ["--for", 0.1]):
        ended = attach(program.pid, *how, "--json", tmp_path)
        assert ended.returncode == 2
        assert ended.stderr == (  # the program was not asked to stand still
            f"tenure: cannot write {tmp_path}: it is a folder: give --json a file\n"
        )
    said = refusal(program.pid, "--once", "--max-pause", 0.000001)
    assert "give --max-pause more seconds" in said


# --- other users -------------------------------------------------------------------------------


@ROOT_ONLY
def test_another_users_process(tmp_path: Path) -> None:
    del tmp_path
    sleeps = subprocess.Popen(["setpriv", f"--reuid={NOBODY}", "sleep", "60"])
    try:
        wait_until(lambda: Path(f"/proc/{sleeps.pid}").stat().st_uid == NOBODY)
        said = refusal(sleeps.pid)
        assert "is user nobody's, and only its own user may attach: run `sudo -u nobody" in said
    finally:
        sleeps.kill()
        sleeps.wait()


TALK = """
import json, os, socket, sys
os.setgid({uid}); os.setuid({uid})
peer = socket.socket(socket.AF_UNIX)
try:
    peer.connect(sys.argv[1])
except PermissionError as error:
    print("not even a connection")
    sys.exit()
peer.settimeout(10)
print(peer.makefile().readline())
"""


def as_nobody(path: Path) -> str:
    text = TALK.format(uid=NOBODY)
    ended = subprocess.run(
        [shutil.which("python3") or sys.executable, "-S", "-c", text, str(path)],
        capture_output=True, text=True, cwd="/", timeout=30, env={},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@ROOT_ONLY
def test_another_user_is_refused(program: Program, runtime: Path) -> None:
    folder = runtime / "tenure"
    path = agent.socket_in(folder, program.pid)
    assert as_nobody(path) == "not even a connection\n"
    # And if someone opened the folder: the kernel tells the agent who asks.
    runtime.chmod(0o755)
    folder.chmod(0o755)
    path.chmod(0o777)
    try:
        answer = json.loads(as_nobody(path))
    finally:
        runtime.chmod(0o700)
        folder.chmod(0o700)
        path.chmod(0o600)
    assert answer["error"] == (
        f"process {program.pid} belongs to user 0 and you are user {NOBODY}: "
        "only its own user may attach"
    )
    assert attach(program.pid, "--once").returncode == 0


@pytest.mark.parametrize("trap", ["a link", "a file", "another user's"])
@ROOT_ONLY
def test_a_folder_that_someone_else_made_is_not_used(tmp_path: Path, trap: str) -> None:
    folder = tmp_path / "tenure"
    if trap == "a link":
        folder.symlink_to(tmp_path)
    elif trap == "a file":
        folder.touch()
    else:
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(OSError, match="is not a folder of user 0: remove it"):
        agent._make_private(folder)


# --- no answer ---------------------------------------------------------------------------------

HOLDS_THE_GIL = WAITS + "import ctypes\nctypes.PyDLL(None).sleep(60)\n"
STUCK_IN_BACKWARD = """
import time, torch
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        print("ready", flush=True)
        time.sleep(60)
Slow.apply(torch.zeros(10, requires_grad=True)).sum().backward()
"""


def test_a_process_whose_python_is_blocked(tmp_path: Path) -> None:
    with running(tmp_path, HOLDS_THE_GIL) as blocked:
        began = time.monotonic()
        said = refusal(blocked.pid, "--once", "--timeout", 1)
        assert "does not answer: it is in a call that lets no other thread" in said
        assert time.monotonic() - began < 10


def test_a_process_that_is_stuck_in_backward(tmp_path: Path) -> None:
    with running(tmp_path, STUCK_IN_BACKWARD) as stuck:
        said = refusal(stuck.pid, "--once", "--timeout", 2)
        assert "could not be looked at for 2 s: a thread is inside backward()" in said


def test_a_process_that_is_stopped(program: Program) -> None:
    program.process.send_signal(signal.SIGSTOP)
    try:
        said = refusal(program.pid, "--once", "--timeout", 0.5)
        assert f"it is stopped, and goes on after `kill -CONT {program.pid}`" in said
    finally:
        program.process.send_signal(signal.SIGCONT)
    assert attach(program.pid, "--once").returncode == 0


def test_ctrl_c_while_it_waits_for_an_answer(program: Program) -> None:
    program.process.send_signal(signal.SIGSTOP)
    try:
        with clients() as start:
            waiting = start(program)
            wait_until(lambda: has_socket(waiting.pid))
            waiting.send_signal(signal.SIGINT)
            _, err = waiting.communicate(timeout=30)
            assert waiting.returncode == 130
            assert "Traceback" not in err
    finally:
        program.process.send_signal(signal.SIGCONT)
    # Until it noticed that nobody is there.
    wait_until(lambda: attach(program.pid, "--once").returncode == 0)


# --- what comes over the wire ------------------------------------------------------------------


def say(program: Program, runtime: Path, *messages: bytes) -> list[dict[str, Any]]:
    """All that the agent answers."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(agent.socket_in(runtime / "tenure", program.pid)))
        for message in messages:
            peer.sendall(message)
        peer.shutdown(socket.SHUT_WR)
        return [json.loads(line) for line in peer.makefile()]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b'{"tenure": 2, "ask": "hello"}\n', "understands version 1"),
        (b'{"tenure": 1, "ask": "exec"}\n', "expects one of: hello"),
        (b"GET / HTTP/1.1\n", "that was no message"),
        (b"[1]\n", "that was no message"),
    ],
)
def test_what_is_not_understood(program: Program, runtime: Path, message: bytes, said: str) -> None:
    (answer,) = say(program, runtime, message)
    assert said in answer["error"]
    assert answer["tenure"] == 1
    assert attach(program.pid, "--once").returncode == 0


def test_a_client_that_leaves_at_once(program: Program, runtime: Path) -> None:
    assert say(program, runtime) == []
    hello = b'{"tenure": 1, "ask": "hello"}\n'
    assert len(say(program, runtime, hello)) == 1
    for ask in (b"look", b"watch"):
        say(program, runtime, hello, b'{"tenure": 1, "ask": "%s", "patience": 5}\n' % ask)
    assert attach(program.pid, "--once").returncode == 0


# --- children ----------------------------------------------------------------------------------

CHILDREN = (
    WAITS
    + """
import os, subprocess, sys
sleeps = "import time; print(1, flush=True); time.sleep(60)"
spawned = subprocess.Popen([sys.executable, "-c", sleeps], stdout=-1)
spawned.stdout.readline()
forked = os.fork()
if forked == 0:
    found = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{n}")]
    open("sockets", "w").write(str(sum(f.startswith("socket:") for f in found)))
    sys.exit()
os.waitpid(forked, 0)
print(spawned.pid, flush=True)
sys.stdin.read()
while True: time.sleep(0.01)
"""
)


def test_children_have_their_own_or_none(tmp_path: Path, runtime: Path) -> None:
    with running(tmp_path, CHILDREN) as parent:
        assert parent.process.stdout is not None
        spawned = int(parent.process.stdout.readline())
        assert (tmp_path / "sockets").read_text() == "0"
        found = {path.name for path in (runtime / "tenure").iterdir()}
        assert {f"agent-{parent.pid}.sock", f"agent-{spawned}.sock"} <= found
        assert "has not imported torch" in refusal(spawned, "--once")
        # The forked one ended, and took neither the socket nor the agent along.
        assert attach(parent.pid, "--once").returncode == 0
        os.kill(spawned, signal.SIGKILL)


def test_the_next_agent_removes_what_killed_ones_left(tmp_path: Path, runtime: Path) -> None:
    text = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
    with running(tmp_path, text) as killed:
        path = agent.socket_in(runtime / "tenure", killed.pid)
        assert path.exists()
    assert path.exists()
    with running(tmp_path, text):
        assert not path.exists()
