"""Processes that are forked from one that has imported torch, instead of importing it for seconds.

    with Forked(["work.py", "--steps", "3"], stdout=PIPE, env=ENV) as process: ...
    with Forked(["-m", "tenure", "version"], stdout=PIPE) as process: ...
    ended = run_forked(["-m", "tenure", "version"])

As `subprocess.Popen` and `subprocess.run` of the Python that runs the tests with these arguments,
for tests that are not about how a process starts. torch has one thread in them. None of them
outlives the caller.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

MOST = 1 << 20  # bytes of a request
OPTIONS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # of mallopt


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """`seed` chooses one of several processes to be forked from: their hashes of str differ."""

    def __init__(self, args: Sequence[object], *, seed: int = 0, **how: Any) -> None:
        self._server = _server(seed)
        super().__init__([str(arg) for arg in args], **how)

    def _execute_child(self, args: Any, *how: Any) -> None:
        executable, before, _, kept, cwd, env, _, _, shell, *pipes = how[:15]
        assert not any((executable, before, shell)), "what it is forked from is Python, and runs"
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        given = [own if end == -1 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "argv": args,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "session": how[-2],
            "deaf": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "kept": [*kept],
        }
        self.pid = self._server.ask(request, [*given, *kept])["pid"]
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not wait_flags & os.WNOHANG:
            ended = os.pidfd_open(self.pid)
            select.select([ended], [], [])
            os.close(ended)
        found = self._server.ask({"wait": self.pid, "flags": wait_flags | os.WNOHANG})
        return found["pid"], found["status"]

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None:
            with self._waitpid_lock:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
        return self.returncode

    def exit_code(self) -> int:
        """Of one that has ended; does not reap it, so that nobody else can get its process id."""
        code: int = self._server.ask({"code of": self.pid})["code"]
        return code

    def stop(self) -> None:
        """Stops it; it is so when this returns."""
        self.send_signal(signal.SIGSTOP)
        while not (found := self._try_wait(os.WUNTRACED | os.WNOHANG))[0]:
            time.sleep(0.001)
        assert os.WIFSTOPPED(found[1])


def run_forked(
    args: Sequence[object], *, timeout: float | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """To its end, with what it wrote."""
    with Forked(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end_in_haste() -> NoReturn:
    """All that Python does at the end, except for taking the imported modules to pieces.

    In a forked process that copies every page of them.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Server:
    """A process of this file, as its clients see it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        atexit.register(self.end)

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            answer = self._socket.recv(MOST)
        assert answer, "the process to fork from has ended"
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> None:
        """Ends it, and with it all that it has forked."""
        self._socket.close()
        self._process.wait()


_servers: dict[int, _Server] = {}
_starting = threading.Lock()


def _server(seed: int) -> _Server:
    with _starting:
        if seed not in _servers:
            _servers[seed] = _Server()
        return _servers[seed]


# --- in the process to fork from ---------------------------------------------------------------


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Forks and waits as it is asked to; in a child returns what it is to be."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, MOST, 64)
        if not data:
            return None
        request = json.loads(data)
        if "code of" in request:
            info = os.waitid(os.P_PID, request["code of"], os.WEXITED | os.WNOWAIT)
            assert info is not None
            code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            connection.send(json.dumps({"code": code}).encode())
            continue
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], request["flags"])
            connection.send(json.dumps({"pid": pid, "status": status}).encode())
            continue
        parent = os.getpid()
        settled, settling = os.pipe()
        if (child := os.fork()) == 0:
            connection.close()
            os.close(settled)
            _die_with(parent)
            _settle(request, files)
            os.close(settling)
            return request
        for file in (*files, settling):
            os.close(file)
        os.read(settled, 1)  # what is asked of the child from now on finds it as it will be
        os.close(settled)
        connection.send(json.dumps({"pid": child}).encode())


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent goes, also by SIGKILL."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _settle(request: dict[str, Any], files: list[int]) -> None:
    if request["session"]:
        os.setsid()
    deaf = request["deaf"]
    signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(out_of_the_way, [0, 1, 2, *request["kept"]], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    assert os.environ.get("OMP_NUM_THREADS", "1") == "1"
    for name, option in OPTIONS.items():
        if name in os.environ:
            ctypes.CDLL(None).mallopt(option, int(os.environ[name]))


def _become(argv: list[str]) -> None:
    """As the interpreter does with its arguments."""
    path = os.environ.get("PYTHONPATH", "")
    sys.path[1:1] = path.split(os.pathsep) if path else []
    if argv[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        return
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    sys.argv = argv
    sys.modules["__main__"].__file__ = argv[0]
    exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), vars(sys.modules["__main__"]))


def _main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        import torch._dynamo
        import torch.distributed  # noqa: F401

        import tenure.cli  # noqa: F401

        # Else one that looks for garbage, at its end at the latest, copies every page of these.
        gc.collect()
        gc.freeze()
        request = _serve(connection)
    if request is not None:
        _become(request["argv"])


if __name__ == "__main__":
    _main()
