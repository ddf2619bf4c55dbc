"""Runs many small programs as processes of their own that import torch only once.

Reads one JSON object a line: program, arguments, cwd, env, out and err (files), and in_haste. Forks
a child for each, at most as many at a time as given, that starts watching as the start-up hook
would and then is the program. Writes `{"at": n, "code": c}` as each ends, n counting the lines. At
the end of its input it ends, and all that still runs with it.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import types
from pathlib import Path
from typing import Any

from forks import end_in_haste


def become(job: dict[str, Any]) -> None:
    """Makes this process the program."""
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    program = Path(job["program"])
    sys.argv = [str(program), *job["arguments"]]
    sys.path[0] = str(program.parent)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = str(program)
    from tenure.inspect.session import watch_from_environment

    watch_from_environment()
    # Without a variable of ours for the module, which would be one more holder of its globals.
    exec(compile(program.read_bytes(), program, "exec"), vars(sys.modules["__main__"]))
    if job["in_haste"]:
        end_in_haste()


class Nursery:
    """The children that run and the jobs that wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[tuple[int, str]] = []
        self._running: dict[int, tuple[int, int]] = {}  # by process: its line and its descriptor
        self._seen = 0
        self._input = b""
        self._events = selectors.DefaultSelector()
        self._events.register(0, selectors.EVENT_READ)

    def run(self) -> dict[str, Any] | None:
        """To the end of the input; in a child returns what it is to be."""
        while True:
            while self._waiting and len(self._running) < self._most:
                at, line = self._waiting.pop(0)
                if (job := self._start(at, line)) is not None:
                    return job
            for key, _ in self._events.select():
                if key.fd != 0:
                    self._reap(key.data)
                elif not self._read():
                    self._end()
                    return None

    def _read(self) -> bool:
        """Takes what has come; returns whether more can come."""
        part = os.read(0, 1 << 16)
        *lines, self._input = (self._input + part).split(b"\n")
        for line in lines:
            self._waiting.append((self._seen, line.decode()))
            self._seen += 1
        return bool(part)

    def _start(self, at: int, line: str) -> dict[str, Any] | None:
        job: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            self._events.close()
            for _, descriptor in self._running.values():
                os.close(descriptor)
            return job
        descriptor = os.pidfd_open(child)
        self._running[child] = at, descriptor
        self._events.register(descriptor, selectors.EVENT_READ, child)
        return None

    def _reap(self, child: int) -> None:
        _, status = os.waitpid(child, 0)
        at, descriptor = self._running.pop(child)
        self._events.unregister(descriptor)
        os.close(descriptor)
        print(json.dumps({"at": at, "code": os.waitstatus_to_exitcode(status)}), flush=True)

    def _end(self) -> None:
        for child in self._running:
            os.killpg(child, signal.SIGKILL)  # it is a session's, and not reaped yet
            os.waitpid(child, 0)


# What the children share; the first step of an optimizer imports this.
import torch._dynamo  # noqa: E402, F401

import tenure.inspect.session  # noqa: E402, F401

# Else one that looks for garbage, at its end at the latest, copies every page of these.
gc.collect()
gc.freeze()
job = Nursery(int(sys.argv[1])).run()
if job is not None:
    become(job)
