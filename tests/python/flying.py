"""A job of real Gloo ranks with flight recorders, or monitors, some of which come to grief.

    with Job(tmp_path, "short", 4) as job:
        job.wait()

Run as a program this is one of the ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from forks import Forked

PATIENCE = 180.0  # seconds for anything, on a machine that is busy with other tests
VICTIM = 2


class Job:
    """Ranks as their parent sees them; none outlives the `with` block."""

    def __init__(self, folder: Path, case: str, ranks: int) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        self.host = Forked([__file__, "store"], stdout=subprocess.PIPE, text=True)
        assert self.host.stdout is not None
        self.store = _store(int(self.host.stdout.readline()))
        self.logs = [folder / f"rank-{rank}" for rank in range(ranks)]
        self.ranks = []
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        for rank in range(ranks):
            arguments = [__file__, case, self.folder, self.store.port, rank, ranks]
            with self.logs[rank].open("wb") as log:
                self.ranks.append(Forked(arguments, stdout=log, stderr=log, env=environment))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.ranks, self.host]:
            process.kill()
            process.wait()

    def wait_for_key(self, *keys: str) -> None:
        self.store.wait(list(keys), timedelta(seconds=PATIENCE))

    def wait(self, *ranks: int) -> list[int]:
        """The exit codes of these ranks, or of all."""
        chosen = ranks or range(len(self.ranks))
        return [self.ranks[rank].wait(PATIENCE) for rank in chosen]

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def snapshot(self, rank: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The rank's snapshot, once it is complete and as it is wanted."""
        process = self.ranks[rank]
        deadline = time.monotonic() + PATIENCE
        while True:
            has_ended = process.poll() is not None  # asked first: what it wrote is there by then
            for file in self.folder.glob(f"*-{rank}-{process.pid}-*.flight.json"):
                found: dict[str, Any] = json.loads(file.read_text())
                if "pending" not in found and wanted(found):
                    return found
            logs = "".join(map(self.log, range(len(self.ranks))))
            assert not has_ended, f"rank {rank} ended without a snapshot\n{logs}"
            assert time.monotonic() < deadline, f"no snapshot of rank {rank}\n{logs}"
            time.sleep(0.02)


def _store(port: int, *, is_host: bool = False) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=is_host,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE),
    )


def _host_a_store() -> None:
    store = _store(0, is_host=True)  # it ends with this
    print(store.port, flush=True)
    signal.pause()


# --- in the rank -----------------------------------------------------------------------------

hoard: list[Any] = []


def _wait_for_file(path: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def _keep_the_gil() -> None:
    """As a module of somebody's does that forgets to let it go."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none wakes this thread
    ctypes.PyDLL(None).sleep(int(PATIENCE))


def _run_short() -> None:
    """Fills a list until the limit on the process's data is reached."""
    import torch

    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    limit = used + (400 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for _ in range(10):
        hoard.append(torch.ones(4 << 20))  # noqa: PERF401  as programs do
    torch.ones(250_000_000)


def _run_short_on_a_device() -> None:
    """Fills a list, and asks for more than any device has."""
    import torch

    for _ in range(10):
        hoard.append(torch.ones(1 << 28, device="cuda"))  # noqa: PERF401  as programs do
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


def _handler(*_: object) -> None:
    print("the program's own handler ran", flush=True)
    sys.exit(7)


def _main(case: str, folder: str, port: int, rank: int, ranks: int) -> None:
    import torch
    import torch.distributed as dist

    import tenure
    from tenure import _C
    from tenure.telemetry.flight import FlightRecorder

    if case == "handler":
        signal.signal(signal.SIGTERM, _handler)
    store = _store(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    held = torch.ones(1 << 20)
    ends: FlightRecorder | tenure.Monitor
    if case.startswith("monitored"):
        hoard.append(tenure.hold(held, "weights", kind="parameter"))
        ends = monitor = tenure.Monitor(sinks=[], every=1, folder=folder)
        for number in range(1, 42):
            monitor.step()
            while monitor.collectives < number:  # its thread looks at the host first
                time.sleep(0.001)
    else:
        seconds = 3.0 if case == "gil" else 10.0
        ends = FlightRecorder(
            folder, rank, ranks, store=store, rows=lambda: [{"step": 41}], seconds=seconds
        )
        ends.start()
        ring = _C.TelemetryRing(folder, host=socket.gethostname(), rank=rank, ranks=ranks)
        ring.append(41, {"host_rss_bytes": 123_000_000, "host_headroom_bytes": 1_000_000})
        for _ in range(41):
            tenure.step()
    dist.barrier()
    store.set(f"ready {rank}", "")
    if case == "gil" and rank == 0:
        _keep_the_gil()
    if rank == min(VICTIM, ranks - 1):  # the others are, or soon will be, inside the collective
        store.wait([f"ready {other}" for other in range(ranks)])
        if case == "orphaned":
            store.set("asks the store no more", "")
            _wait_for_file(Path(folder, "go"))
            ends.failed(ValueError("this rank has had enough"))
            _wait_for_file(Path(folder, "end"))  # others would fail of its end
            sys.exit(1)
        if case.endswith("short on a device"):
            _run_short_on_a_device()
        if case.endswith("short"):
            _run_short()
        store.wait(["go"])
    dist.all_reduce(held)
    ends.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "store":
        _host_a_store()
    _main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
