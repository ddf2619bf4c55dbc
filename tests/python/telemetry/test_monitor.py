"""The monitor on real ranks: which rank has most, and what it costs the others to know."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import mmap
import os
import statistics
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

import tenure
from ranks import run_ranks
from scratch import scratch_monitor
from tenure import _C
from tenure.report import flights
from tenure.telemetry import meeting as meeting_module
from tenure.telemetry import monitor as monitor_module
from tenure.telemetry.figures import Figures
from tenure.telemetry.meeting import levels_of
from tenure.telemetry.rings import rings_of

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def rollup() -> dict[str, int]:
    """What the kernel says of this process's mappings together, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line[-2:] == "kB"}


def resident() -> tuple[int, int]:
    """What the OS says: resident bytes, exactly, and the number of mappings."""
    return rollup()["Rss"], len(Path("/proc/self/maps").read_text().splitlines())


def held(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def told(seen: list[Figures], count: int) -> list[Figures]:
    """Waits until so many intervals are known."""
    until = time.monotonic() + 30
    while len(seen) < count:
        assert time.monotonic() < until, f"{len(seen)} of {count} intervals"
        time.sleep(0.005)
    return seen


# --- which rank has most ---------------------------------------------------------------------


def uneven(rank: int, _world_size: int, writer: int) -> Any:
    sizes = [40, 10, 160, 80]
    keep = held(sizes[rank])
    seen: list[Figures] = []
    with scratch_monitor(sinks=[seen.append], every=1, writer=writer, stage=rank // 2) as monitor:
        held(64)  # a new highest, which the first interval has
        # A held plateau: all ranks have allocated, and none allocates any more.
        for _ in range(5):
            monitor.step()
            dist.barrier()
        if rank == writer:
            told(seen, 5)
        dist.barrier()
        os_says = resident()
    del keep
    return os_says, seen


@pytest.fixture(scope="module")
def by_writer() -> dict[int, Any]:
    return {writer: run_ranks(uneven, 4, writer) for writer in (0, 3)}


@pytest.mark.parametrize("writer", [0, 3])
def test_the_highest_rank_and_stage_are_what_the_os_says(
    by_writer: dict[int, Any], writer: int
) -> None:
    results = by_writer[writer]
    assert [bool(seen) for _, seen in results] == [rank == writer for rank in range(4)]
    last = results[writer][1][-1]
    (rss, mappings), told_rss = results[2][0], last.world["host_rss_bytes"]
    assert told_rss.rank == 2
    assert abs(told_rss.value - rss) <= mappings * PAGE
    assert last.peak_rank == 2
    assert last.peak_row["host_rss_bytes"] == told_rss.value
    for stage, highest in ((0, 0), (1, 2)):
        found = last.stages[stage]["host_rss_bytes"]
        (rss, mappings), _ = results[highest]
        assert found.rank == highest
        assert abs(found.value - rss) <= mappings * PAGE


def all_keys(seen: list[Figures]) -> set[str]:
    return {key for one in seen for key in one.world}


def test_which_rank_writes_makes_no_difference(by_writer: dict[int, Any]) -> None:
    first, last = by_writer[0][0][1][-1], by_writer[3][3][1][-1]
    assert first.peak_rank == last.peak_rank == 2
    # Of all intervals: on a plateau a later one may have no new highest, which is not told then.
    assert all_keys(by_writer[0][0][1]) == all_keys(by_writer[3][3][1])
    assert first.world["host_rss_bytes"].rank == last.world["host_rss_bytes"].rank


def rises_below_a_plateau(rank: int, _world_size: int) -> list[Figures]:
    keep = [held([0, 300, 0][rank])]
    seen: list[Figures] = []
    with scratch_monitor(sinks=[seen.append], every=1, stage=rank) as monitor:
        for _ in range(6):
            if rank == 2:
                keep.append(held(16))  # a new highest of its own in each interval
            monitor.step()
            dist.barrier()
        if rank == 0:
            told(seen, 6)
        dist.barrier()
    del keep
    return seen


def test_a_rank_that_rises_below_another_is_not_said_to_have_the_highest_peak() -> None:
    seen = run_ranks(rises_below_a_plateau, 3)[0]
    peaks = [(one.world.get("host_rss_peak_bytes"), one.stages[2]) for one in seen]
    assert sum("host_rss_peak_bytes" in rising for _, rising in peaks) >= 5
    assert {peak.rank for peak, _ in peaks if peak is not None} <= {1}


# --- one collective an interval --------------------------------------------------------------


def kept_groups() -> list[Any]:
    """The groups of the monitors that are made from now on in this process, to be asked."""
    groups: list[Any] = []

    def meet(*args: Any, **kwargs: Any) -> Any:
        meeting = meeting_module.meet(*args, **kwargs)
        groups.extend(meeting.groups)
        return meeting

    monitor_module.meet = meet
    return groups


def counted(_rank: int, _world_size: int, steps: int, every: int) -> Any:
    before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    seen: list[Figures] = []
    groups = kept_groups()
    monitor = scratch_monitor(sinks=[seen.append], every=every)
    for _ in range(steps):
        monitor.step()
        dist.barrier()
    monitor.close(30)
    after = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    told_steps = [figures.step for figures in seen]
    (own,) = (group._get_sequence_number_for_group() for group in groups)
    return own, monitor.collectives, after - before - steps, told_steps, monitor.dropped


def test_a_thousand_intervals_are_a_thousand_collectives_and_none_is_the_jobs() -> None:
    results = run_ranks(counted, 4, 1000, 1)
    assert [result[:3] for result in results] == [(1000, 1000, 0)] * 4
    *_, told_steps, dropped = results[0]
    assert set(told_steps) <= set(range(1, 1001))
    assert len(told_steps) + dropped == 1000  # without a pause a sink may be too slow for some
    assert [result[3] for result in results[1:]] == [[]] * 3


def drift(rank: int, _world_size: int) -> Any:
    keep = held(64 * rank)
    seen: deque[Figures] = deque(maxlen=1)
    monitor = scratch_monitor(sinks=[seen.append], every=1)
    for step in range(1300):
        monitor.step()
        dist.barrier()
        if step == 299:
            begin = resident()[0]
    os_says = resident()
    monitor.close(30)
    del keep
    return os_says[0] - begin, os_says, seen[-1].world["host_rss_bytes"] if seen else None


def test_a_thousand_intervals_leave_nothing_behind() -> None:
    """And what is told then is still what the OS says."""
    results = run_ranks(drift, 2)
    # 128 kept rows of half a kilobyte, and the allocator's own pages: a leak of one row an interval
    # would be 500 kB, of one set of figures 15 MB.
    assert all(grown < 4 * MIB for grown, _, _ in results)
    (rss, mappings), highest = results[1][1], results[0][2]
    assert highest.rank == 1
    assert abs(highest.value - rss) <= mappings * PAGE


def test_intervals_are_every_so_many_steps() -> None:
    results = run_ranks(counted, 2, 25, 10)
    assert results[0] == (2, 2, 0, [10, 20], 0)


# --- ranks that differ, leave, or are late ----------------------------------------------------


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"every": 5}, "rank 2 is not like rank 0's: every differs (5 and 10)"),
    ({"writer": 2}, "rank 2 is not like rank 0's: writer differs (2 and 0)"),
    ({"alerts": [("rss > 1 TB", "stop")]}, "rank 2 is not like rank 0's: alerts differs"),
    ({"every": 0}, "the monitor on rank 2: every is a number of steps, 1 or more, not 0"),
    ({"alerts": [3]}, "the monitor on rank 2: 3 is no alert rule"),
]


def refusal(**options: Any) -> str:
    """Why there is no such monitor; empty: there is."""
    try:
        scratch_monitor(**options, timeout=30)
    except tenure.InputError as error:
        return str(error)
    return ""


def another_layout(rank: int, _world_size: int) -> list[str]:
    """One after the other: a refusal leaves ranks in step for the next."""
    return [refusal(**(differs if rank == 2 else {})) for differs, _ in DIFFERENT]


def test_a_rank_with_another_configuration_is_named_on_all_ranks() -> None:
    results = run_ranks(another_layout, 4)
    assert results == [results[0]] * 4
    for said, (_, expected) in zip(results[0], DIFFERENT, strict=True):
        assert expected in said


def of_another_version(rank: int, _world_size: int) -> str:
    if rank == 2:
        _C.telemetry_layout = lambda: "of another version"
    return refusal()


def test_a_rank_whose_words_mean_something_else_is_named_on_all_ranks() -> None:
    results = run_ranks(of_another_version, 4)
    assert results == [results[0]] * 4
    assert "rank 2 is not like rank 0's: version of Tenure differs" in results[0]


def bad_sink_on_the_writer(_rank: int, _world_size: int) -> str:
    return refusal(sinks=["nonsense"])


def test_what_is_wrong_on_the_writer_is_known_to_all_at_once() -> None:
    begin = time.monotonic()
    results = run_ranks(bad_sink_on_the_writer, 2)
    assert time.monotonic() - begin < 25
    assert all("nonsense" in result for result in results)


def one_has_none(rank: int, _world_size: int) -> str:
    if rank == 1:
        return ""
    try:
        scratch_monitor(timeout=1)
    except tenure.CollectiveError as error:
        return str(error)
    return ""


def test_a_rank_without_a_monitor_is_named() -> None:
    results = run_ranks(one_has_none, 3)
    assert "no monitor on rank 1 after 1 s" in results[0]
    assert "no monitor on rank 1 after 1 s" in results[2]


def one_leaves(rank: int, _world_size: int) -> Any:
    seen: list[Figures] = []
    # With a rule that may stop it, a step waits for the interval before.
    monitor = scratch_monitor(sinks=[seen.append], every=1, alerts=[("growth > 1 TB/step", "stop")])
    for _ in range(3):
        monitor.step()
    dist.barrier()
    if rank == 1:
        monitor.close(30)
    dist.barrier()
    begin = time.monotonic()
    if rank != 1:
        for _ in range(3):
            monitor.step()
        monitor.close(30)
    took = time.monotonic() - begin
    dist.barrier()  # until here the one that left lives
    return took, [(one.step, one.world["host_rss_bytes"].rank) for one in seen]


def test_a_rank_that_leaves_costs_the_others_its_figures_and_nothing_else() -> None:
    # Of five, two are not connected with the one that leaves by what Gloo passes around.
    results = run_ranks(one_leaves, 5)
    assert [step for step, _ in results[0][1]] == [1, 2, 3, 4, 5, 6]
    assert [rank for _, rank in results[0][1][3:]] == [0, 0, 0]
    assert max(took for took, _ in results) < 20


def without_a_store(rank: int, world_size: int) -> Any:
    host = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not rank else None
    )
    port = [host.port if host else 0]
    dist.broadcast_object_list(port)
    store = dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    monitor_module.meet = lambda *args, **kwargs: replace(
        meeting_module.meet(*args, **kwargs), store=store
    )
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tenure.telemetry").addHandler(listener)
    seen: list[Figures] = []
    with scratch_monitor(sinks=[seen.append], every=1, flight_recorder=False) as monitor:
        for step in range(3):
            monitor.step()
            if rank == 0:
                told(seen, step + 1)
                host = None  # it ends with this
            dist.barrier()
    return said, [(one.ranks, len(one.world) > 0) for one in seen], world_size


def test_a_store_that_is_gone_costs_single_ranks_figures_and_that_is_said_once() -> None:
    (said, seen, _), (others, _, _) = run_ranks(without_a_store, 2)
    assert len(seen) == 3
    assert seen == [(2, True)] * 3
    (line,) = said
    assert line.startswith("the job's store failed: figures of single ranks are not told any more")
    assert "\n" not in line
    assert others == []


def peak_without_a_store(rank: int, _world_size: int) -> Any:
    if rank == 1:  # what it posts nobody sees
        monitor_module.meet = lambda *args, **kwargs: replace(
            meeting_module.meet(*args, **kwargs), store=dist.HashStore()
        )
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tenure.telemetry").addHandler(listener)
    keep = held(160 if rank == 1 else 1)
    seen: list[Figures] = []
    rule = ("rss > 1000 TB", "stop")  # every step waits for the interval before
    with scratch_monitor(
        sinks=[seen.append], every=1, flight_recorder=False, alerts=rule
    ) as monitor:
        begin = time.monotonic()
        for _ in range(12):
            monitor.step()
        took = time.monotonic() - begin
        began = time.monotonic()
        monitor.close(1)
        closing = time.monotonic() - began
    assert keep.numel() > 0
    return took, closing, said, [(one.peak_rank, len(one.rows)) for one in seen]


def test_a_peak_without_a_store_is_waited_for_once_and_that_is_said_once() -> None:
    (took, closing, said, seen), _ = run_ranks(peak_without_a_store, 2)
    assert took < 10
    assert closing < 3
    assert seen == [(1, 0)] * 12
    (line,) = said
    assert line.startswith("rank 1 does not show its figures")


def outliers(rank: int, _world_size: int, folder: str) -> bool:
    keep = held(160 if rank == 2 else 10)
    with tenure.Monitor(sinks=[], every=1, folder=folder) as monitor:
        for _ in range(3):
            monitor.step()
            dist.barrier()
        if rank == 3:
            (Path(folder) / "beside").write_text('{"id": "1", "reason": "request", "text": "test"}')
            (Path(folder) / "beside").rename(Path(folder) / "dump.request")
        until = time.monotonic() + 30
        found: dict[str, Any] = {}
        while found.get("request") != "1" or "pending" in found:
            assert time.monotonic() < until
            time.sleep(0.02)
            (file,) = [*Path(folder).glob(f"*-{rank}-{os.getpid()}-*.flight.json")] or [None]
            found = json.loads(file.read_text()) if file else {}
        dist.barrier()
    assert keep.numel() > 0
    return bool(found["whole"])


def test_a_rank_with_most_writes_all_it_knows_whoever_writes_the_log(tmp_path: Path) -> None:
    whole = run_ranks(outliers, 4, str(tmp_path))
    assert whole[0], "the lowest of its stage"
    assert whole[2], "the one that has most"
    assert not all(whole)


def late(rank: int, _world_size: int) -> Any:
    _C.TelemetryMonitor = functools.partial(_C.TelemetryMonitor, most_due=100)  # type: ignore[misc,assignment]
    monitor = scratch_monitor(sinks=[], every=1)
    begin = time.monotonic()
    if rank == 0:
        for _ in range(500):  # more than it keeps rows of
            monitor.step()
    took = time.monotonic() - begin
    dist.barrier()
    if rank == 1:
        for _ in range(500):
            monitor.step()
    monitor.close(60)
    return took, monitor.collectives


def test_a_rank_far_ahead_does_not_wait_and_no_interval_is_lost() -> None:
    first, second = run_ranks(late, 2)
    assert first[0] < 5
    assert (first[1], second[1]) == (500, 500)


def closes_alone(rank: int, _world_size: int) -> float:
    monitor = scratch_monitor(every=1, sinks=[])
    if rank == 0:
        monitor.step()  # a collective that nobody joins
        begin = time.monotonic()
        monitor.close(0.5)
        return time.monotonic() - begin
    return 0.0


def test_closing_does_not_wait_for_a_rank_that_does_not_come() -> None:
    assert run_ranks(closes_alone, 2)[0] < 5


def in_a_subgroup(rank: int, _world_size: int) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        try:
            scratch_monitor(group, sinks=[])
        except tenure.InputError as error:
            return str(error)
        return ""
    keep = held(30 if rank == 3 else 1)
    seen: list[Figures] = []
    with scratch_monitor(group, sinks=[seen.append], every=1) as monitor:
        monitor.step()
    del keep
    return [(one.ranks, one.rank, one.peak_rank, one.peak_row == one.rows[3]) for one in seen]


def test_a_group_has_monitors_of_its_own_that_name_ranks_as_the_job_does() -> None:
    results = run_ranks(in_a_subgroup, 4)
    assert results[1] == [(2, 1, 3, True)]
    assert results[3] == []
    assert "not in the group" in results[0]
    assert "not in the group" in results[2]


def in_two_groups(rank: int, _world_size: int, folder: str) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    keep = held(30 if rank > 1 else 1)
    seen: list[Figures] = []
    options: dict[str, Any] = {"sinks": [seen.append], "every": 1, "folder": folder}
    with tenure.Monitor(groups[rank % 2], flight_recorder="quiet", **options) as monitor:
        monitor.step()
        if rank < 2:
            told(seen, 1)
        dist.barrier()
        if rank == 3:
            monitor.failed(ValueError("enough"))
        mine = f"*-{rank}-{os.getpid()}-*.flight.json"
        until = time.monotonic() + 60
        while not any("pending" not in one.read_text() for one in Path(folder).glob(mine)):
            assert time.monotonic() < until, "what happens to one group is the other's matter, too"
            time.sleep(0.02)
        dist.barrier()
    del keep
    return [one.world["host_rss_bytes"].rank for one in seen]


def test_monitors_of_two_groups_share_a_folder(tmp_path: Path) -> None:
    results = run_ranks(in_two_groups, 4, str(tmp_path))
    assert results == [[2], [3], [], []]
    rings = rings_of(tmp_path)
    assert [(one.identity.rank, one.identity.ranks) for one in rings] == [(n, 4) for n in range(4)]
    failed, *others = flights.find([tmp_path])
    assert (failed.who.rank, failed.reason) == (3, "exception")
    assert [(one.who.rank, one.reason) for one in others] == [(n, "told") for n in range(3)]


# --- two levels ------------------------------------------------------------------------------


def test_small_groups_have_one_level() -> None:
    assert levels_of([[0, 2], [1, 3]]) == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize(("nodes", "size"), [(16, 8), (2048, 8), (3, 100), (70, 1)])
def test_no_group_has_more_than_64_members_and_all_are_reached(nodes: int, size: int) -> None:
    levels = levels_of([list(range(node * size, (node + 1) * size)) for node in range(nodes)])
    assert all(len(members) <= 64 for level in levels for members in level)
    assert sorted(rank for members in levels[0] for rank in members) == list(range(nodes * size))
    for lower, upper in itertools.pairwise(levels):
        assert [members[0] for members in lower] == [rank for group in upper for rank in group]
    assert len(levels[-1]) == 1


def loops_of_gloo(rank: int, world_size: int, backend: str) -> list[int]:
    def loops() -> int:
        names = [one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")]
        return names.count("gloo_tcp_loop")

    _C.telemetry_most_members = 2  # so that two levels are needed
    if backend != "gloo":
        store = dist.PrefixStore("again", c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    before, groups = loops(), kept_groups()
    with scratch_monitor(sinks=[], every=1, _node=str(rank // 2)) as monitor:
        monitor.step()
        return [before, loops(), len(groups)]


@pytest.mark.parametrize(("backend", "more"), [("gloo", 0), ("cuda:gloo", 1)])
def test_the_jobs_way_to_other_ranks_is_used(backend: str, more: int) -> None:
    for before, after, _ in (results := run_ranks(loops_of_gloo, 4, backend)):
        assert after - before == more
    assert [groups for *_, groups in results] == [2, 1, 2, 1]


def in_levels(rank: int, world_size: int, members: int) -> Any:
    from tenure import _C

    _C.telemetry_most_members = members
    keep = held(20 if rank == world_size - 2 else 1)
    seen: list[Figures] = []
    monitor = scratch_monitor(sinks=[seen.append], every=1, _node=str(rank // 2))
    for _ in range(3):
        monitor.step()
    monitor.close(30)
    del keep
    return monitor.collectives, [(one.step, one.peak_rank) for one in seen]


def test_levels_reduce_to_the_same() -> None:
    results = run_ranks(in_levels, 8, 2)
    assert results[0][1] == [(1, 6), (2, 6), (3, 6)]
    # Four nodes of two, two leaders of leaders, one pair on top.
    assert [count // 3 for count, _ in results] == [5, 2, 4, 2, 5, 2, 4, 2]


# --- no group, bad use -----------------------------------------------------------------------


def test_without_a_group_it_tells_of_this_process(tmp_path: Path) -> None:
    seen: list[Figures] = []
    with tenure.Monitor(sinks=[seen.append], every=2, folder=tmp_path) as monitor:
        for _ in range(6):
            monitor.step()
    assert [one.step for one in seen] == [seen[0].step + 2 * at for at in range(3)]
    rss, _ = resident()
    assert abs(seen[-1].world["host_rss_bytes"].value - rss) < 64 * MIB
    assert all(type(one.value) is int for one in seen[-1].world.values())
    assert seen[-1].peak_row == seen[-1].rows[0]
    assert monitor.collectives == 0


def alone_in_a_group(_rank: int, _world_size: int) -> Any:
    before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    seen: list[Figures] = []
    with scratch_monitor(sinks=[seen.append], every=1) as monitor:
        for _ in range(3):
            monitor.step()
    after = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    return monitor.collectives, after - before, seen


def test_a_world_of_one_tells_the_same_without_a_collective() -> None:
    ((collectives, of_the_job, seen),) = run_ranks(alone_in_a_group, 1)
    assert (collectives, of_the_job, len(seen)) == (0, 0, 3)
    assert (seen[-1].rank, seen[-1].ranks, seen[-1].peak_rank) == (0, 1, 0)
    assert seen[-1].peak_row == seen[-1].rows[0]


def test_the_hosts_figures_are_the_kernels(tmp_path: Path) -> None:
    seen: list[Figures] = []
    with (
        mmap.mmap(-1, 48 * MIB) as shared,  # shared with children, were there any
        tenure.Monitor(sinks=[seen.append], every=1, folder=tmp_path) as monitor,
    ):
        shared.write(b"x" * len(shared))
        kernel = rollup()
        until = time.monotonic() + 60
        for count in itertools.count(1):
            monitor.step()
            world = {name: one.value for name, one in told(seen, count)[-1].world.items()}
            # A thread of its own looks, now and then.
            if world.get("host_pss_bytes") == pytest.approx(kernel["Pss"], rel=0.05):
                break
            assert time.monotonic() < until, (world, kernel)
            time.sleep(0.05)
    assert world["host_shared_bytes"] >= 48 * MIB
    assert world["host_shared_bytes"] == pytest.approx(kernel["Pss_Shmem"], rel=0.05)
    assert world["host_headroom_bytes"] <= world["host_limit_bytes"]


def test_what_an_offload_has_promised_is_the_bound(tmp_path: Path) -> None:
    seen: list[Figures] = []
    with tenure.Monitor(sinks=[seen.append], every=1, folder=tmp_path) as monitor:
        session = tenure.Offload(target="copy", budget="3GiB")
        monitor.step()
        told(seen, 1)
        del session
        monitor.step()
        told(seen, 2)
    assert seen[0].world["bound_bytes"].value == 3 << 30
    assert "bound_bytes" not in seen[1].world


def test_sinks_that_hang_or_fail_hold_up_neither_steps_nor_other_sinks(tmp_path: Path) -> None:
    never = threading.Event()
    seen: list[int] = []

    def fails(_: Figures) -> None:
        raise OSError("no space left on device")

    sinks = [lambda _: never.wait(), fails, lambda figures: seen.append(figures.step)]
    monitor = tenure.Monitor(sinks=sinks, every=1, folder=tmp_path)
    try:
        took = []
        for step in range(1, 301):
            begin = time.monotonic()
            monitor.step()
            took.append(time.monotonic() - begin)
            until = time.monotonic() + 30
            while len(seen) < step - 1:  # an interval is known when the next one begins
                assert time.monotonic() < until, f"{len(seen)} of {step}"
                time.sleep(0.0005)
        assert statistics.median(took) < 0.001
        assert max(took) < 1
        assert monitor.dropped >= 300 - 64, "what two sinks did not get"
    finally:
        begin = time.monotonic()
        monitor.close(0.5)
        never.set()
    assert time.monotonic() - begin < 5
    assert len(seen) >= 299
    assert seen == list(range(seen[0], seen[0] + len(seen)))


def test_leases_are_told_by_owner(tmp_path: Path) -> None:
    seen: list[Figures] = []
    with (
        tenure.Monitor(sinks=[seen.append], every=1, folder=tmp_path) as monitor,
        tenure.hold(torch.zeros(1024), "weights", kind="parameter"),
        tenure.hold(torch.zeros(512), "copy", kind="host_copy"),
    ):
        monitor.step()
    assert seen[0].world["parameters_bytes"].value >= 4096
    assert seen[0].world["offloaded_bytes"].value >= 2048


def test_steps_count_on_the_one_clock(tmp_path: Path) -> None:
    before = tenure.steps()
    with tenure.Monitor(sinks=[], every=1, folder=tmp_path) as monitor:
        for _ in range(5):
            monitor.step()
    assert tenure.steps() - before in (4, 5)  # the first may echo an earlier leader's


def test_two_threads_are_refused(tmp_path: Path) -> None:
    with tenure.Monitor(sinks=[], every=1, folder=tmp_path) as monitor:
        monitor.step()
        errors: list[BaseException] = []

        def other() -> None:
            try:
                monitor.step()
            except tenure.InputError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "two threads" in str(errors[0])


def test_a_program_may_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with tenure.Monitor(sinks=["jsonl"], every=1, folder="run") as monitor:
        monkeypatch.chdir(tmp_path / "elsewhere")
        monitor.step()
        assert monitor._recorder is not None
        snapshot = monitor._recorder.dump("to see where it goes")
    assert snapshot.parent == tmp_path / "run"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_closed_monitor_says_so(tmp_path: Path) -> None:
    monitor = tenure.Monitor(sinks=[], folder=tmp_path)
    monitor.close()
    monitor.close()
    with pytest.raises(tenure.InputError, match="closed"):
        monitor.step()


def test_a_forked_child_has_no_monitor(tmp_path: Path) -> None:
    monitor = tenure.Monitor(sinks=[], every=1, folder=tmp_path)
    monitor.step()
    if (child := os.fork()) == 0:
        try:
            monitor.step()
        except tenure.InputError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    monitor.close()


def destroyed(_rank: int, _world_size: int) -> str:
    monitor = scratch_monitor(sinks=[], every=1)
    monitor.step()
    dist.barrier()
    dist.destroy_process_group()
    try:
        monitor.step()
    except tenure.InputError as error:
        monitor.close()
        said = str(error)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness
    return said


def test_destroyed_groups_are_said() -> None:
    assert all("destroyed under this monitor" in one for one in run_ranks(destroyed, 2))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"every": 0}, "every is a number of steps"),
        ({"every": 2.5}, "every is a number of steps"),
        ({"stage": -1}, "stage is a number"),
        ({"writer": 3}, "no rank 3 to write"),
        ({"alerts": ["nonsense"]}, "no alert rule"),
        ({"sinks": ["graphite"]}, "graphite"),
        ({"compat": "nonsense"}, "nonsense"),
        ({"folder": "/proc/nowhere"}, "the monitor cannot write to /proc/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(tenure.InputError, match=complaint) as caught:
        tenure.Monitor(**({"folder": tmp_path} | arguments))
    assert "\n" not in str(caught.value)
