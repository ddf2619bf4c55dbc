"""Rings: what one process writes, another reads, also after a kill, also from damaged files."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenure import _C
from tenure.errors import InputError
from tenure.telemetry.rings import Ring, Rings, read, rings_of

HOST = socket.gethostname()


def make(folder: Path, rank: int = 0, ranks: int = 4, **options: Any) -> _C.TelemetryRing:
    given = {"host": HOST, "slots": 8} | options
    return _C.TelemetryRing(str(folder), rank=rank, ranks=ranks, **given)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    ring = make(tmp_path, 2, stage=1, stages=2, role="policy", attempt=3)
    for step in range(20):
        ring.append(step, {"host_rss_bytes": 1000 + step, "device_growth_bytes_per_step": -step})
    seen = read(ring.path)
    assert seen.path.name == f"{HOST}-2-{os.getpid()}-3.ring"
    who = seen.identity
    assert (who.host, who.rank, who.ranks, who.pid) == (HOST, 2, 4, os.getpid())
    assert (who.stage, who.stages, who.role, who.attempt) == (1, 2, "policy", 3)
    assert [row["step"] for row in seen.rows] == list(range(12, 20))
    assert seen.appended == 20
    last = seen.rows[-1]
    assert abs(last.pop("when") / 1e9 - time.time()) < 60
    assert last == {"step": 19, "host_rss_bytes": 1019, "device_growth_bytes_per_step": -19}
    assert seen.units["device_growth_bytes_per_step"] == "bytes per step"
    assert (seen.alive, seen.state, seen.closed) == (True, "running", None)
    assert [row["step"] for row in read(ring.path, last=2).rows] == [18, 19]
    ring.close("out of memory")
    ended = read(ring.path)
    assert (ended.alive, ended.state, ended.closed) == (False, "ended", "out of memory")


def test_nothing_written_yet(tmp_path: Path) -> None:
    ring = make(tmp_path)
    seen = read(ring.path, last=2)
    assert seen.rows == []
    assert seen.alive


def killed(folder: Path, live: Callable[[_C.TelemetryRing], None]) -> tuple[Ring, Ring]:
    """A rank's ring while it runs and when it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        ring = make(folder)
        live(ring)
        os.write(writing, b"x")
        while True:
            signal.pause()
    os.read(reading, 1)
    (path,) = folder.iterdir()
    running = read(path)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    zombie = read(path)
    os.waitpid(child, 0)
    gone = read(path)
    assert zombie.state == gone.state, "a process that is not reaped yet runs no more"
    return running, gone


def test_a_killed_rank_has_died_and_its_last_rows_are_there(tmp_path: Path) -> None:
    def live(ring: _C.TelemetryRing) -> None:
        for step in range(20):
            ring.append(step, {"host_rss_bytes": step})

    running, gone = killed(tmp_path, live)
    assert (running.state, running.alive) == ("running", True)
    assert (gone.state, gone.alive, gone.closed) == ("died", False, None)
    assert [row["step"] for row in gone.rows] == list(range(12, 20))


def test_what_was_noted_counts_if_the_rank_is_gone(tmp_path: Path) -> None:
    running, gone = killed(tmp_path, lambda ring: ring.note("failed: ValueError: no layer"))
    assert (running.state, running.closed) == ("running", None)
    assert (gone.state, gone.alive) == ("failed", False)
    assert gone.closed == "failed: ValueError: no layer"


def test_what_was_noted_is_past_where_the_rank_went_on(tmp_path: Path) -> None:
    ring = make(tmp_path)
    ring.note("failed: ValueError: in a thread that nobody needs")
    ring.append(1, {})
    assert read(ring.path).state == "running"
    ring.close()
    ended = read(ring.path)
    assert (ended.state, ended.closed, len(ended.rows)) == ("ended", "ended", 1)


def edited(path: str, what: str, becomes: str) -> None:
    """Changes a line of the head's text to one of the same length or shorter."""
    file = Path(path)
    data = file.read_bytes()
    old, new = what.encode(), becomes.encode()
    assert old in data
    assert len(new) <= len(old)
    file.write_bytes(data.replace(old, new + b"\n" * (len(old) - len(new)), 1))


def test_another_process_with_the_same_number_is_not_the_rank(tmp_path: Path) -> None:
    ring = make(tmp_path)
    start = read(ring.path).identity.process_start
    edited(ring.path, f"process_start\t{start}\n", f"process_start\t{'1' * len(start)}\n")
    assert read(ring.path).state == "died"


def test_of_a_rank_elsewhere_the_age_decides(tmp_path: Path) -> None:
    ring = make(tmp_path)
    machine = read(ring.path).identity.machine
    edited(ring.path, f"machine\t{machine}\n", "machine\tanother\n")
    now = time.time_ns()
    ring.append(1, {}, when=now - 10**9)
    assert read(ring.path).state == "running"
    ring.append(2, {}, when=now - 3600 * 10**9)
    seen = read(ring.path)
    assert seen.state == "silent"
    assert 3600 <= seen.age < 3700


def test_a_rank_with_long_intervals_is_not_silent_between_them(tmp_path: Path) -> None:
    ring = make(tmp_path)
    now = time.time_ns()
    for step, ago in ((1, 200), (2, 100)):
        ring.append(step, {}, when=now - ago * 10**9)
    assert read(ring.path).state == "running"
    ring.append(3, {}, when=now - 99 * 10**9)
    assert read(ring.path).state == "silent"


def test_a_row_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    ring = make(tmp_path)
    for step in range(6):
        ring.append(step, {"host_rss_bytes": step})
    file = Path(ring.path)
    data = bytearray(file.read_bytes())
    begin, width = struct.unpack_from("=II", data, 16)
    data[begin + 3 * width + 80] ^= 1
    file.write_bytes(data)
    assert [row["step"] for row in read(file).rows] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:0], "is no ring of samples"),
        (lambda data: data[:100], "is no ring of samples"),
        (lambda data: b"SQLite format 3\0" + data[16:], "is no ring of samples"),
        (lambda data: data[:-1], "is cut: "),
        (lambda data: data[:8] + b"\x02\0\0\0" + data[12:], "is a ring of version 2"),
        (lambda data: data[:24] + b"\xff" * 4 + data[28:], "its head makes no sense"),
        (lambda data: data[:20] + b"\0" * 4 + data[24:], "its head makes no sense"),
        (lambda data: data.replace(b"\nrank\t0\n", b"\nrank\tx\n"), "does not say whose"),
        (lambda data: data.replace(b"key\tleases", b"kee\tleases"), "figures without a name"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Any, said: str) -> None:
    good = make(tmp_path, 1)
    bad = Path(make(tmp_path, 0).path)
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(InputError, match=said) as raised:
        read(bad)
    assert str(bad) in str(raised.value)
    assert "\n" not in str(raised.value)
    found = Rings(tmp_path)
    assert [str(ring.path) for ring in found.look()] == [good.path]
    assert list(found.broken) == [bad]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        rings_of(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        rings_of(tmp_path / "file")
    assert rings_of(tmp_path) == []


def test_the_newest_attempt_of_a_rank_counts(tmp_path: Path) -> None:
    kept = [make(tmp_path, rank, 4) for rank in range(4)]
    again = make(tmp_path, 2, 4, attempt=1)
    assert [ring.identity.attempt for ring in rings_of(tmp_path)] == [0, 0, 1, 0]
    for ring in (*kept, again):
        ring.close()
    smaller = [make(tmp_path, rank, 2, attempt=2) for rank in range(2)]
    found = rings_of(tmp_path)
    assert [str(ring.path) for ring in found] == [ring.path for ring in smaller]


def test_looking_again_follows_what_comes_and_goes(tmp_path: Path) -> None:
    ring = make(tmp_path)
    found = Rings(tmp_path)
    assert [one.appended for one in found.look()] == [0]
    ring.append(7, {"leases": 3})
    other = make(tmp_path, 1)
    assert [len(one.rows) for one in found.look(last=2)] == [1, 0]
    Path(other.path).unlink()
    again = make(tmp_path, 0, slots=4)  # under the same name
    again.append(9, {"leases": 5})
    (seen,) = found.look(last=2)
    assert [row["step"] for row in seen.rows] == [9]
    Path(again.path).unlink()
    assert found.look() == []
    assert found.broken == {}


def test_a_forked_child_does_not_write_its_parents_ring(tmp_path: Path) -> None:
    ring = make(tmp_path)
    ring.append(1, {})
    child = os.fork()
    if child == 0:
        ring.append(2, {})
        ring.close("by the child")
        os._exit(0)
    os.waitpid(child, 0)
    seen = read(ring.path)
    assert (seen.appended, seen.closed) == (1, None)


def test_figures_that_nobody_knows_and_folders_that_cannot_be(tmp_path: Path) -> None:
    ring = make(tmp_path)
    with pytest.raises(InputError, match="there is no figure 'colour'"):
        ring.append(1, {"colour": 3})
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot keep samples in .*file: Not a directory"):
        make(tmp_path / "file")
    with pytest.raises(InputError, match="there is no rank 4 of 4"):
        make(tmp_path, 4)
