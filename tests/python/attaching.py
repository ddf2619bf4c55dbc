"""Programs with an idle agent, and `tenure attach` to them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from forks import Forked, run_forked
from tenure.inspect.options import idle_environment

# Trains for ever, leaves the seconds of each step in a file, and says what is hooked when asked by
# a signal.
TRAINS = """
import json, os, signal, struct, sys, threading, time
import torch

def opened():
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            pass  # closed by now, perhaps by another thread

def state(*_):
    from torch.optim import optimizer as optimizers
    tenure = sys.modules.get("tenure._C")
    found = {
        "level": getattr(tenure, "observed_level", lambda: "off")(),
        "step hooks": len(optimizers._global_optimizer_post_hooks),
        "patched": "__init__" in vars(torch.UntypedStorage)
        or hasattr(torch.from_numpy, "__wrapped__"),
        "threads": len(os.listdir("/proc/self/task")),
        "files": sorted(opened()),
        "python threads": sorted(t.name for t in threading.enumerate()),
    }
    with open("state.new", "w") as file:
        json.dump(found, file)
    os.rename("state.new", "state")

signal.signal(signal.SIGUSR1, state)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
shelf = [torch.zeros(1 << 18) for _ in range(4)]
kept = []
times = open("times", "wb", buffering=0)

def step(leak=False):
    began = time.perf_counter()
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if leak:
        kept.append(torch.randn(5000))
    times.write(struct.pack("d", time.perf_counter() - began))

for _ in range(3):
    model(torch.randn(32, 256)).sum().backward()
    optimizer.step()
optimizer.zero_grad()
print("ready", flush=True)
"""
TRAINING = TRAINS + "while True: step(leak='leak' in sys.argv)\n"
# Waits for its data most of the time, unless there is a file that says otherwise.
AT_EASE = """
while True:
    step()
    if not os.path.exists("in haste"):
        time.sleep(0.005)
"""


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths may not be long."""
    folder = Path(tempfile.mkdtemp(prefix="attach"))
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(folder)


class Program:
    """A process with an agent, and what it left in its folder."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.pid = process.pid

    def step_times(self) -> array[float]:
        """Seconds of every step so far."""
        found = array("d")
        data = (self.folder / "times").read_bytes()
        found.frombytes(data[: len(data) // 8 * 8])
        return found

    def steps_go_on(self, many: int) -> array[float]:
        """The seconds of that many steps from now on."""
        before = len(self.step_times())
        until = time.monotonic() + 60
        while len(self.step_times()) < before + many:
            assert self.process.poll() is None, (self.folder / "stderr").read_text()
            assert time.monotonic() < until, "it does not go on"
            time.sleep(0.01)
        return self.step_times()[before:]

    def state(self) -> dict[str, Any]:
        """What is hooked, how many threads and descriptors there are."""
        (self.folder / "state").unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 90  # a busy disk may take long
        while not (self.folder / "state").exists():
            assert self.process.poll() is None, (self.folder / "stderr").read_text()
            assert time.monotonic() < until
            time.sleep(0.005)
        found: dict[str, Any] = json.loads((self.folder / "state").read_text())
        return found

    def state_when(self, **wanted: Any) -> dict[str, Any]:
        """The state once it is so."""
        until = time.monotonic() + 30
        while True:
            found = self.state()
            if all(found[key] == value for key, value in wanted.items()):
                return found
            assert time.monotonic() < until, found


@contextmanager
def running(
    folder: Path, text: str, *arguments: str, ready: bool = True, **variables: str
) -> Iterator[Program]:
    """A program with an idle agent, until the end of the block."""
    (folder / "train.py").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),
        text=True,
        env={**os.environ, **idle_environment(), "OMP_NUM_THREADS": "1", **variables},
    )
    try:
        assert process.stdout is not None
        if ready:
            assert process.stdout.readline() == "ready\n", (folder / "stderr").read_text()
        yield Program(process, folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def command(*arguments: str) -> list[str]:
    return ["-m", "tenure", "attach", *arguments]


def attach(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`tenure attach`, to its end."""
    return run_forked(command(*map(str, arguments)), timeout=60, cwd=cwd)


@contextmanager
def clients() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """What starts `tenure attach` and does not wait; none of them outlives the block."""
    with ExitStack() as at_end:

        def start(program: Program, *arguments: str, **how: Any) -> subprocess.Popen[str]:
            process = Forked(
                command(str(program.pid), *arguments), stdout=-1, stderr=-1, text=True, **how
            )
            at_end.enter_context(process)
            at_end.callback(process.kill)
            return process

        yield start
