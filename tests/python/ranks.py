"""Runs a function on N real Gloo ranks, each a process of its own: see forks.py.

    def total(rank, world_size, start):          # at the top level of a test module
        t = torch.tensor([start + rank])
        dist.all_reduce(t)
        return t.item()

    assert run_ranks(total, 2, 10) == [21, 21]

When a rank fails, dies or hangs, every rank is ended and an AssertionError shows what each of them
printed and, for those that hung, where: see `run_ranks`.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from forks import Forked, end_in_haste

# How long ranks may take to end by themselves once one of them has failed, if a test does not say
# otherwise, and to say where they hang.
GRACE_S = 3.0
STACK_S = 2.0
STACK_SIGNAL = signal.SIGUSR2


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float = GRACE_S,
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` on every rank and returns their results, by rank.

    Each rank has a default process group on Gloo over loopback. `fn` must be a function at the top
    level of a file; arguments and results must pickle. `timeout` is for the whole run, `grace` for
    what is left of it once a rank has failed. No rank outlives the call, however it ends, nor does
    anything that a rank started in its process group.

    Raises:
        AssertionError: A rank raised, died, ended without a result or was still running at the
            timeout, or the grace after another one failed. The text holds every rank's output.
    """
    module, name = fn.__module__, fn.__qualname__
    if "<" in name or "." in name or getattr(sys.modules.get(module), name, None) is not fn:
        raise ValueError(
            f"{module}.{name} is not at the top level of its module: ranks cannot find it"
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(
            sys.path, module, fn.__code__.co_filename, name, world_size, timeout, pickle.dumps(args)
        )
        (Path(folder) / "job").write_bytes(pickle.dumps(job))
        ranks: list[_Rank] = []
        with ExitStack() as at_end:
            for number in range(world_size):
                ranks.append(_Rank.start(number, Path(folder)))
                at_end.callback(ranks[-1].end)
            failure = _wait(ranks, timeout, grace)
        failure = failure or _without_result(ranks)
        outputs = "".join(rank.describe() for rank in ranks)
        if failure:
            raise AssertionError(f"{name} on {world_size} ranks: {failure}\n{outputs}")
        print(outputs, end="")
        return [pickle.loads(rank.result.read_bytes()) for rank in ranks]


@dataclass
class _Job:
    """What a rank is told."""

    path: list[str]
    module: str
    file: str
    name: str
    world_size: int
    timeout: float
    args: bytes  # pickled apart: they may need the module, which is not loaded yet


@dataclass
class _Rank:
    """One rank as its parent sees it."""

    number: int
    process: Forked
    pidfd: int
    stack_pipe: int
    output: Path
    result: Path
    hung: bool = False
    stack: str = ""
    code: int | None = None

    @classmethod
    def start(cls, number: int, folder: Path) -> _Rank:
        output = folder / f"output-{number}"
        stack_pipe, child_end = os.pipe()
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        try:
            with output.open("wb") as file:
                process = Forked(
                    [__file__, folder, number, child_end],
                    seed=number % 2,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=[child_end],
                    start_new_session=True,
                )
        finally:
            os.close(child_end)
        pidfd = os.pidfd_open(process.pid)
        return cls(number, process, pidfd, stack_pipe, output, folder / f"result-{number}")

    def exit_code(self) -> int:
        """The exit code of a rank that has ended, without reaping it.

        Until `end` reaps it nobody else can get its process id, which is also its group's.
        """
        return self.process.exit_code()

    def ask_for_stack(self) -> None:
        signal.pidfd_send_signal(self.pidfd, STACK_SIGNAL)

    def read_stack(self, deadline: float) -> None:
        """Reads what the rank says about itself, up to a pause or the deadline."""
        parts: list[bytes] = []
        pipe = select.poll()
        pipe.register(self.stack_pipe, select.POLLIN)
        while pipe.poll(200 if parts else max(0, 1000 * (deadline - time.monotonic()))):
            part = os.read(self.stack_pipe, 1 << 16)
            if not part:
                break
            parts.append(part)
        self.stack = b"".join(parts).decode(errors="replace")

    def end(self) -> None:
        """Ends the rank's process group, whatever is left of it, and reaps the rank."""
        members = _pidfds_of_group(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        for pidfd in members:  # a signal is sent before it is obeyed
            select.select([pidfd], [], [], GRACE_S)
            os.close(pidfd)
        self.code = self.process.wait()
        os.close(self.pidfd)
        os.close(self.stack_pipe)

    def describe(self) -> str:
        text = self.output.read_text(errors="replace")
        if not text and self.code == 0 and not self.hung:
            return ""
        text = text if not text or text.endswith("\n") else text + "\n"
        if self.hung:
            where = self.stack or f"(no Python stack: it did not answer {STACK_SIGNAL.name})\n"
            return f"---- rank {self.number}: hung, killed ----\n{text}{where}"
        return f"---- rank {self.number}: {_ending(self.code)} ----\n{text}"


def _pidfds_of_group(group: int) -> list[int]:
    pidfds = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(ProcessLookupError, FileNotFoundError):  # it ended while we looked
            _, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group:
                pidfds.append(os.pidfd_open(int(stat.parent.name)))
    return pidfds


def _ending(code: int | None) -> str:
    return f"died of {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


def _wait(ranks: list[_Rank], timeout: float, grace: float) -> str:
    """Waits until all ranks have ended; returns what went wrong, or nothing."""
    start = time.monotonic()
    deadline = start + timeout
    running = {rank.pidfd: rank for rank in ranks}
    poll = select.poll()
    for pidfd in running:
        poll.register(pidfd, select.POLLIN)
    failures: list[str] = []
    while running:
        ended = poll.poll(max(0, 1000 * (deadline - time.monotonic())))
        if not ended:
            _see_where_they_hang(list(running.values()))
            numbers = ", ".join(str(rank.number) for rank in running.values())
            failures.append(f"still running after {time.monotonic() - start:.0f} s: rank {numbers}")
            break
        for pidfd, _ in ended:
            poll.unregister(pidfd)
            rank = running.pop(pidfd)
            if (code := rank.exit_code()) != 0:
                failures.append(f"rank {rank.number}: {_ending(code)}")
                deadline = min(deadline, time.monotonic() + grace)
    return "; ".join(failures)


def _see_where_they_hang(ranks: list[_Rank]) -> None:
    deadline = time.monotonic() + STACK_S
    for rank in ranks:
        rank.hung = True
        rank.ask_for_stack()
    for rank in ranks:
        rank.read_stack(deadline)


def _without_result(ranks: list[_Rank]) -> str:
    missing = [str(rank.number) for rank in ranks if not rank.result.exists()]
    return f"ended without a result: rank {', '.join(missing)}" if missing else ""


# --- in the rank -----------------------------------------------------------------------------


def _load(job: _Job) -> Callable[..., Any]:
    """The function, from its file: pytest's importlib mode puts test modules on no path."""
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    spec.loader.exec_module(module)
    return getattr(module, job.name)


def _main(folder: Path, rank: int, stack_pipe: int) -> None:
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stack_pipe, all_threads=True)
    job: _Job = pickle.loads((folder / "job").read_bytes())
    sys.path[:] = job.path
    # Here, because the parent needs neither.
    import torch.distributed as dist

    fn = _load(job)
    # A file, not a port: no other process can take it first.
    store = dist.FileStore(str(folder / "store"), job.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )
    result = fn(rank, job.world_size, *pickle.loads(job.args))
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
    if rank != 0:  # that an interpreter ends well with all that a rank has is what rank 0 shows
        end_in_haste()


if __name__ == "__main__":
    # Pickle must find _Job where the parent has it.
    sys.modules["ranks"] = sys.modules["__main__"]
    _main(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
