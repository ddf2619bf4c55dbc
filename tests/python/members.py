"""Processes of a store's job, each started for a test and told what to do.

    with Member(job, "trainer", 0) as trainer:
        handle = trainer.call("put", "step", 0, {"shape": [4]})

What they can be told to do are the functions of store_work.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from forks import Forked
from gives_back import GIVES_BACK

HERE = Path(__file__).parent


def until(holds: Callable[[], bool]) -> None:
    """Asks again until it does."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class RemoteError(AssertionError):
    """What a member raised: `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Member:
    """`within` names a network namespace that it goes into."""

    def __init__(
        self,
        job: str,
        role: str = "trainer",
        rank: int = 0,
        *,
        within: str = "",
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        known = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        self.process = Forked(
            [HERE / "members.py", job, role, rank, json.dumps(options), within],
            seed=rank % 2,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=known | GIVES_BACK | (environment or {}),
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, function: str, *arguments: Any, **options: Any) -> None:
        """Has it begin; `result` waits for the end."""
        assert self.process.stdin is not None
        _send(self.process.stdin, (function, arguments, options))

    def result(self) -> Any:
        assert self.process.stdout is not None
        kind, value = _receive(self.process.stdout)
        if kind == "raised":
            raise RemoteError(*value)
        return value

    def call(self, function: str, *arguments: Any, **options: Any) -> Any:
        self.start(function, *arguments, **options)
        return self.result()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Does nothing meanwhile; it is so when the block begins."""
        self.process.stop()
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the member has ended")
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def _enter(namespace: str) -> None:
    """Takes the thread there, and those that it starts."""
    of_the_network = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), of_the_network) != 0:
            raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered")


def _obey() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not get between the answers

    import store_work
    import tenure

    job, role, rank, options, within = sys.argv[1:]
    if within:
        _enter(within)
    tenure.store.join(job, role, int(rank), **json.loads(options))
    while True:
        try:
            function, arguments, keywords = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = "returned", getattr(store_work, function)(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001  whatever it is, the test is told
            answer = "raised", (type(error).__name__, str(error))
        _send(answers, answer)


if __name__ == "__main__":
    _obey()
