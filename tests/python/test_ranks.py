"""The helper that runs ranks: results, failures with every rank's output, nothing left running."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks


def total(rank: int, world_size: int, start: float) -> tuple[int, int, torch.Tensor]:
    t = torch.full((3,), start + rank)
    dist.all_reduce(t)
    return rank, world_size, t


@dataclass
class Seen:
    """What one rank has seen."""

    total: tuple[int, int, torch.Tensor]
    ring: tuple[float, float, int]
    forgotten: tuple[int, str]


def see(rank: int, world_size: int, start: float) -> Seen:
    return Seen(total(rank, world_size, start), ring_in_cpp(), forget_in_cpp())


@pytest.fixture(scope="module", params=[2, 3])
def seen(request: pytest.FixtureRequest) -> list[Seen]:
    """By every rank of two and of three."""
    return run_ranks(see, request.param, 10.0)


def assert_all_reduced(results: list[tuple[int, int, torch.Tensor]]) -> None:
    world_size = len(results)
    expected = torch.full((3,), sum(10.0 + rank for rank in range(world_size)))
    assert [result[:2] for result in results] == [(rank, world_size) for rank in range(world_size)]
    assert all(torch.equal(t, expected) for _, _, t in results)


def test_all_reduce(seen: list[Seen]) -> None:
    assert_all_reduced([rank.total for rank in seen])


def test_one_rank() -> None:
    assert_all_reduced(run_ranks(total, 1, 10.0))


def fail_on_one(rank: int, world_size: int) -> None:
    print(f"hello from {rank} of {world_size}")
    if rank == 1:
        raise ValueError(f"boom on {rank}")
    sit_here_for_ever()


def test_exception_is_shown_by_rank_without_waiting_for_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run_ranks(fail_on_one, 2, timeout=300)
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert "rank 1: exit code 1" in text.splitlines()[0]
    of_0, of_1 = text.split("---- rank 1:")
    assert "---- rank 0: hung, killed" in of_0
    assert "hello from 0 of 2" in of_0
    assert "hello from 1 of 2" in of_1
    assert "ValueError: boom on 1" in of_1


def note_pids(folder: Path, rank: int) -> None:
    """Leaves this rank's process id and that of a child it starts."""
    child = subprocess.Popen(["sleep", "1000"])
    (folder / f"pids-{rank}").write_text(f"{os.getpid()} {child.pid}")


def is_running(pid: int) -> bool:
    """Whether a process is there, and not a zombie that waits for init."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def pids_in(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("pids-*") for pid in file.read_text().split()]


def hang_on_one(rank: int, world_size: int, folder: Path) -> None:
    note_pids(folder, rank)
    print(f"hello from {rank} of {world_size}", flush=True)
    if rank == 1:
        sit_here_for_ever()


def sit_here_for_ever() -> None:
    threading.Event().wait()


def test_hang_ends_with_every_output_and_nothing_running(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run_ranks(hang_on_one, 2, tmp_path, timeout=8)
    assert time.monotonic() - start < 20
    text = str(failure.value)
    assert "still running after 8 s: rank 1" in text.splitlines()[0]
    of_0, of_1 = text.split("---- rank 1: hung, killed ----")
    assert "hello from 0 of 2" in of_0
    assert "exit code 0" in of_0
    assert "hello from 1 of 2" in of_1
    assert "in sit_here_for_ever" in of_1, "the stack of the rank that hung"
    pids = pids_in(tmp_path)
    assert len(pids) == 4
    assert not any(is_running(pid) for pid in pids)


def die_or_leave(rank: int, _world_size: int) -> None:
    if rank == 0:
        os.abort()
    os._exit(0)


def test_death_and_silence_are_failures() -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(die_or_leave, 2)
    text = str(failure.value)
    assert "rank 0: died of SIGABRT" in text.splitlines()[0]
    assert "in die_or_leave" in text, "faulthandler's stack"
    with pytest.raises(AssertionError, match="ended without a result: rank 0"):
        run_ranks(leave, 1)


def leave(_rank: int, _world_size: int) -> None:
    os._exit(0)


def test_local_functions_are_refused() -> None:
    def local(rank: int, world_size: int) -> None: ...

    with pytest.raises(ValueError, match="not at the top level"):
        run_ranks(local, 1)


def hang_on_all(rank: int, _world_size: int, folder: Path) -> None:
    note_pids(folder, rank)
    with (folder / "started").open("w") as fifo:
        fifo.write("x")
    sit_here_for_ever()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_caller(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "started")
    code = (
        f"import sys; sys.path[:] = {sys.path}\n"
        "import pathlib, test_ranks\n"
        f"test_ranks.run_ranks(test_ranks.hang_on_all, 1, pathlib.Path({str(tmp_path)!r}))"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # where one that is killed may leave its files
    )
    with (tmp_path / "started").open() as fifo:
        fifo.read()
    rank, child_of_rank = pids_in(tmp_path)
    pidfd = os.pidfd_open(rank)
    try:
        caller.send_signal(number)
        _, errors = caller.communicate(timeout=20)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        assert ended.poll(5000), "the rank is still there"
        if number == signal.SIGINT:
            assert b"KeyboardInterrupt" in errors
            assert not is_running(child_of_rank)
    finally:
        os.close(pidfd)
        caller.kill()
        caller.communicate()
        if is_running(child_of_rank):  # nobody is left to end it but us
            os.kill(child_of_rank, signal.SIGKILL)


# --- cases in C++ ----------------------------------------------------------------------------


def ring_in_cpp() -> tuple[float, float, int]:
    import tenure_rank_cases

    case = tenure_rank_cases.ring(dist.group.WORLD)
    return case.total, case.received, case.left


def test_cpp_ring_leaves_no_lease(seen: list[Seen]) -> None:
    world_size = len(seen)
    for rank, result in enumerate(seen):
        everyone = sum(range(1, world_size + 1))
        neighbour = (rank - 1) % world_size + 1
        assert result.ring == (everyone, neighbour, 0)


def forget_in_cpp() -> tuple[int, str]:
    import tenure_rank_cases

    case = tenure_rank_cases.ring_that_forgets(dist.group.WORLD)
    return case.left, case.report


def test_cpp_ring_that_forgets_its_buffer_is_reported(seen: list[Seen]) -> None:
    for left, report in (rank.forgotten for rank in seen):
        assert left == 1
        assert "receive_buffer 'ring'" in report
