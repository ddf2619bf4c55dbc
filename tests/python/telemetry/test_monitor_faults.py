"""What a monitor does when a rank is late, memory is short, or arguments are wrong."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tenure
from offloading import tell
from probes import run_program
from ranks import run_ranks
from scratch import scratch_monitor
from tenure.telemetry.figures import Figures

MIB = 1 << 20


def one_is_late(rank: int, _world_size: int) -> list[int]:
    kept = []
    with scratch_monitor(sinks=[], every=1) as monitor:
        if rank == 1:
            time.sleep(2)
        for _ in range(5):
            kept.append(torch.ones(16 * MIB // 4))
            monitor.step()
            time.sleep(0.2)
        if rank == 0:
            time.sleep(0.2)
            return [row["host_rss_bytes"] for row in monitor._monitor.recent()]
    return []


def test_rows_are_of_their_steps_also_when_a_rank_is_late() -> None:
    told, _ = run_ranks(one_is_late, 2)
    assert len(told) == 5, "the ring does not wait for the other rank either"
    growth = [after - before for before, after in itertools.pairwise(told)]
    assert all(14 * MIB < grown < 40 * MIB for grown in growth), growth


def test_a_program_that_runs_out_of_memory_and_goes_on_goes_on(tmp_path: Path) -> None:
    # 64 stages, so that an interval takes more memory than a heap has left over.
    program = """
        import os, resource, time
        import tenure
        monitor = tenure.Monitor(
            sinks=[], every=1, stage=63, folder=os.environ["FOLDER"], flight_recorder=False
        )
        for _ in range(3):
            monitor.step()
        time.sleep(0.5)
        status = open("/proc/self/status").read()
        data = int(status.split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (data + (64 << 20),) * 2)
        hog, taken, size = [None] * 2_000_000, 0, 1 << 20
        while size >= 16:
            try:
                while taken < len(hog):
                    hog[taken] = bytes(size)
                    taken += 1
            except MemoryError:
                size //= 2
        for _ in range(200):
            try:
                monitor.step()
            except MemoryError:
                pass
        until = time.monotonic() + 1
        while time.monotonic() < until:
            pass
        del hog
        monitor.step()
        monitor.close()
        print("went on")
    """
    for _ in range(3):  # which allocation fails is not the same each time
        ended = run_program(program, FOLDER=str(tmp_path))
        assert (ended.returncode, ended.stdout) == (0, "went on\n"), ended.stderr[-2000:]


def wrong_on_one(rank: int, _world_size: int) -> tuple[str, int]:
    wrong: dict[str, Any] = {"alerts": 5} if rank == 1 else {}
    with pytest.raises(tenure.InputError) as error:
        scratch_monitor(sinks=["prometheus"], timeout=20, **wrong)
    seen: list[Figures] = []
    # The port is free again, and the ranks still meet.
    with scratch_monitor(sinks=[seen.append, "prometheus"], every=1, timeout=20) as monitor:
        monitor.step()
    return str(error.value), len(seen)


def test_an_argument_that_is_wrong_on_one_rank_is_told_on_all_and_can_be_mended() -> None:
    (first, seen), (second, _) = run_ranks(wrong_on_one, 2)
    assert first == second
    assert first.startswith("the monitor on rank 1: alerts is a rule such as 'headroom < 5%'")
    assert seen == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"writer": "0"}, "writer is a rank of the group, not '0'"),
        ({"timeout": -1}, "timeout is a number of seconds, not -1"),
        ({"flight_recorder": "loud"}, "flight_recorder is True, False or 'quiet', not 'loud'"),
        ({"folder": None}, "folder is a path, not None"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(tenure.InputError, match=says):
        tenure.Monitor(**{"sinks": [], "folder": tmp_path, **wrong})


def test_an_alerts_function_that_hangs_does_not_hold_up_training(tmp_path: Path) -> None:
    free = threading.Event()
    rules = [("rss > 1 MiB", lambda _: free.wait()), ("rss > 1000 TB", "stop")]
    with tenure.Monitor(sinks=[], every=1, folder=tmp_path, alerts=rules) as monitor:
        begin = time.monotonic()
        monitor.step()
        monitor.step()
        assert time.monotonic() - begin < 10
        free.set()


def test_the_first_interval_has_its_peak(tmp_path: Path, fake: ModuleType) -> None:
    tell(fake)
    seen: list[Figures] = []
    kept = torch.empty(10 * MIB, dtype=torch.uint8, device="fake")
    with tenure.Monitor(sinks=[seen.append], every=1, folder=tmp_path) as monitor:
        for size in (400, 100):
            torch.empty(size * MIB, dtype=torch.uint8, device="fake")
            monitor.step()
    del kept
    peaks = [one.world["device_allocated_peak_bytes"].value // MIB for one in seen]
    assert peaks == [410, 110]
