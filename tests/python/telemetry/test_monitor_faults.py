"""What a monitor does when a rank is late, memory is short, or arguments are wrong."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed as dist

import tenure
from forks import run_forked
from offloading import tell
from probes import run_program
from ranks import run_ranks
from scratch import scratch_monitor
from tenure.telemetry import meeting as meeting_module
from tenure.telemetry import monitor as monitor_module
from tenure.telemetry.alerts import AlertSpec, Broken
from tenure.telemetry.calling import Caller
from tenure.telemetry.figures import Figure, Figures
from tenure.telemetry.rings import rings_of

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
        monitor = tenure.Monitor(sinks=[], every=1, stage=63, folder=os.environ["FOLDER"])
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
        assert not [*tmp_path.glob("*.flight.json")], "nothing has failed"


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


def wrong_group_on_one(rank: int, _world_size: int) -> tuple[str, int]:
    with pytest.raises(tenure.InputError) as error:
        scratch_monitor("x" if rank == 1 else None, sinks=[], timeout=40)
    with scratch_monitor(sinks=[], every=1, timeout=40) as monitor:  # the ranks still meet
        monitor.step()
    return str(error.value), monitor.collectives


def test_a_group_that_is_none_on_one_rank_is_told_on_all() -> None:
    told = run_ranks(wrong_group_on_one, 3)
    assert told == [("the monitor on rank 1: group is a process group, not 'x'", 1)] * 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"writer": "0"}, "writer is a rank of the group, not '0'"),
        ({"timeout": -1}, "timeout is a number of seconds, not -1"),
        ({"timeout": float("inf")}, "timeout is a number of seconds, not inf"),
        ({"flight_recorder": "loud"}, "flight_recorder is True, False or 'quiet', not 'loud'"),
        ({"folder": None}, "folder is a path, not None"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(tenure.InputError, match=says):
        tenure.Monitor(**{"sinks": [], "folder": tmp_path, **wrong})


def with_another_group(_rank: int, _world_size: int) -> str:
    with pytest.raises(tenure.InputError) as error:
        scratch_monitor("x", sinks=[])
    return str(error.value)


def test_a_group_that_is_none_is_refused() -> None:
    assert run_ranks(with_another_group, 1) == ["group is a process group, not 'x'"]


def loses_the_store(rank: int, _world_size: int, folder: str) -> list[list[int]]:
    there = Path(folder, f"store-{rank}")
    there.symlink_to(Path(folder, "store"))
    store = dist.FileStore(str(there), 2)
    monitor_module.meet = lambda *args, **kwargs: replace(
        meeting_module.meet(*args, **kwargs), store=store
    )
    seen: list[Figures] = []
    keep = torch.ones((160 if rank == 0 else 1) * MIB // 4)  # rank 0 is the highest
    with scratch_monitor(sinks=[seen.append], every=1, flight_recorder=False) as monitor:
        for step in range(11):  # the first and the last have the rows of all
            monitor.step()
            until = time.monotonic() + 30
            while monitor.collectives <= step or (rank == 0 and len(seen) <= step):
                assert time.monotonic() < until
                time.sleep(0.005)
            dist.barrier()
            if step == 5 and rank == 1:
                there.unlink()
                there.symlink_to(folder)  # which cannot be written to
    there.unlink()
    there.symlink_to(Path(folder, "store"))  # for the end of what is not ours
    assert keep.numel() > 0
    return [sorted(one.rows) for one in seen]


def test_a_rank_that_loses_the_store_later_is_not_told_with_an_old_row(tmp_path: Path) -> None:
    rows, _ = run_ranks(loses_the_store, 2, str(tmp_path))
    assert rows == [[0, 1], *[[]] * 9, [0]]


def connects_alone(rank: int, _world_size: int) -> str:
    class Ends(dist.ProcessGroupGloo):
        def __init__(self, *_: object) -> None:
            raise RuntimeError("no network")

    if rank == 1:
        meeting_module.c10d.ProcessGroupGloo = Ends  # type: ignore[misc]
    with pytest.raises(tenure.CollectiveError) as error:
        scratch_monitor(sinks=[], timeout=2)
    return str(error.value)


def test_ranks_that_cannot_connect_say_so() -> None:
    waits, ended = run_ranks(connects_alone, 2)
    assert waits.startswith("the monitors agree and cannot connect within 2 s: ")
    assert ended.startswith("the monitors agree and cannot connect within 2 s: no network; ")
    assert "\n" not in waits


def test_an_alerts_function_that_hangs_does_not_hold_up_training(tmp_path: Path) -> None:
    free = threading.Event()
    called: list[Broken] = []
    seen: list[Figures] = []
    rules: list[AlertSpec] = [
        ("rss > 1 MiB", lambda _: free.wait()),
        ("rss > 1 MiB", called.append),
        ("rss > 1000 TB", "stop"),
    ]
    with tenure.Monitor(sinks=[seen.append], every=1, folder=tmp_path, alerts=rules) as monitor:
        begin = time.monotonic()
        for _ in range(6):
            monitor.step()
        while len(seen) < 6 or not called:
            assert time.monotonic() - begin < 10
            os.sched_yield()
        free.set()


def broken(step: int) -> Broken:
    return Broken("rss > 1 B", "host_rss_bytes is 2 B", "host_rss_bytes", Figure(2, 0), step)


def test_alerts_that_a_function_is_too_slow_for_are_lost_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free = threading.Event()
    called: list[int] = []

    def slow(what: Broken) -> None:
        free.wait()
        called.append(what.step)

    caller = Caller(slow)
    for step in range(100):
        caller.call(broken(step))
    free.set()
    caller.end()
    caller.wait(20)
    assert called[:64] == list(range(64))
    assert len(called) in (64, 65), "one is under way, 64 wait"
    (line,) = caplog.messages
    assert "an alert's function is slow or hangs" in line


def test_a_function_that_exits_is_called_again() -> None:
    called: list[int] = []

    def leave(what: Broken) -> None:
        called.append(what.step)
        sys.exit(1)

    caller = Caller(leave)
    for step in range(3):
        caller.call(broken(step))
    caller.end()
    caller.wait(20)
    assert called == [0, 1, 2]


def test_an_interval_that_cannot_be_told_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    figures_of = monitor_module._Telling._figures

    def figures(telling: Any, told: Any) -> Figures:
        if told.number in (2, 3):
            raise MemoryError
        return figures_of(telling, told)

    monkeypatch.setattr(monitor_module._Telling, "_figures", figures)
    seen: list[Figures] = []
    with tenure.Monitor(
        sinks=[seen.append], every=1, folder=tmp_path, alerts=("rss > 1000 TB", "stop")
    ) as monitor:
        for _ in range(6):
            monitor.step()
    assert len(seen) == 4
    assert [one for one in caplog.messages if "could not be told" in one] == [
        "an interval could not be told: MemoryError"
    ]
    assert not [*tmp_path.glob("*.flight.json")]


@pytest.mark.parametrize("who", ["sink", "function"])
def test_a_monitor_may_be_closed_by_what_it_calls(tmp_path: Path, who: str) -> None:
    closed = threading.Event()

    def close(_: object) -> None:
        monitor.close()
        closed.set()

    monitor = tenure.Monitor(
        sinks=[close] if who == "sink" else [],
        every=1,
        folder=tmp_path,
        alerts=[("rss > 1 MiB", close)] if who == "function" else [],
    )
    monitor.step()
    assert closed.wait(20)
    with pytest.raises(tenure.InputError, match="this monitor is closed"):
        monitor.step()
    (ring,) = rings_of(tmp_path)
    assert (ring.state, ring.closed) == ("ended", "ended")
    assert not [*tmp_path.glob("*.live")]


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


PEAKS = """
import sys, torch, fake_accelerator, tenure
kept = torch.empty(10 * 2**20, dtype=torch.uint8, device="fake")
with tenure.Monitor(sinks=[], every=1, folder=sys.argv[1]) as monitor:
    for _ in range(3):
        monitor.step()
"""


def test_that_peaks_are_not_known_is_said_once(tmp_path: Path) -> None:
    """In a process whose device's allocator has told nobody of what it gives out."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_forked(["-c", PEAKS, tmp_path], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("device peaks within an interval are known only where they are") == 1
