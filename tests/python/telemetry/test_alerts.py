"""Alert rules: what they mean, when they speak, and that all ranks stop at the same step."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import tenure
from ranks import run_ranks
from scratch import scratch_monitor
from tenure.telemetry.alerts import Alert, Broken, Watch, alerts_of
from tenure.telemetry.figures import Figure, Figures
from tenure.telemetry.keys import KEYS


def figures(step: int, **values: int) -> Figures:
    world = {key: Figure(value, 2) for key, value in values.items()}
    return Figures(step, 0.0, 0, 4, tuple(KEYS.values()), world, {}, 2, values)


@pytest.mark.parametrize(
    ("rule", "values", "broken"),
    [
        ("headroom < 5%", {"device_headroom_permille": 49}, True),
        ("headroom < 5%", {"device_headroom_permille": 50}, False),
        ("headroom <= 5%", {"device_headroom_permille": 50}, True),
        ("headroom < 5%", {"device_headroom_permille": 90, "host_headroom_permille": 10}, True),
        ("headroom < 1 GiB", {"host_headroom_bytes": (1 << 30) - 1}, True),
        ("headroom < 1 GB", {"host_headroom_bytes": 10**9}, False),
        ("growth > 1 MB/step", {"host_growth_bytes_per_step": 1_000_001}, True),
        ("growth > 1MB/step", {"device_growth_bytes_per_step": 1_000_000}, False),
        ("growth < -1 KiB/step", {"host_growth_bytes_per_step": -1025}, True),
        ("rss >= 1.5 KiB", {"host_rss_bytes": 1536}, True),
        ("retries > 0", {"device_retries": 1}, True),
        ("steps_left < 1000", {"steps_left": 999}, True),
        ("steps_left < 1000", {}, False),
        ("owner_x < 1", {}, None),
        ("activations_bytes > 3 MiB", {"activations_bytes": 4 << 20}, True),
        ("activations > 3 MiB", {"activations_bytes": 4 << 20}, True),
    ],
)
def test_what_a_rule_means(rule: str, values: dict[str, int], broken: bool | None) -> None:
    if broken is None:
        with pytest.raises(tenure.InputError, match="no figure"):
            Alert(rule)
        return
    assert bool(Watch([Alert(rule)]).look(figures(10, **values))) is broken


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "headroom",
        "headroom < ",
        "headroom = 5%",
        "headroom < 5 parsecs",
        "headroom < 5%/step",
        "growth > 1 MB",
        "growth > 1 MB/step for ever",
        "rss > 5%",
        "headroom < 5% and rss > 1 GB",
        "headroom < 500%",
        "headroom < -5%",
        "host_headroom_permille < 5 GB",
        "leases < 10 MB",
        "step_microseconds > 5 GiB",
        "steps_left < 100 MB",
        "fragmentation > 20",
        None,
        7,
    ],
)
def test_a_rule_that_does_not_parse_is_one_sentence(rule: Any) -> None:
    with pytest.raises(tenure.InputError, match="is no alert rule") as caught:
        Alert(rule)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_unit_is_said() -> None:
    with pytest.raises(tenure.InputError, match="fragmentation is in %, as in 'fragmentation >"):
        Alert("fragmentation > 20")
    with pytest.raises(tenure.InputError, match="retries is not in MB, it is a number"):
        Alert("retries > 3 MB")


def test_an_action_that_is_none() -> None:
    with pytest.raises(tenure.InputError, match="'log', 'stop' or a function"):
        Alert("rss > 1 GB", "explode")  # type: ignore[arg-type]


def test_rules_as_users_write_them() -> None:
    assert [one.rule for one in alerts_of("rss > 1 GB")] == ["rss > 1 GB"]
    assert [one.action for one in alerts_of(("rss > 1 GB", "stop"))] == ["stop"]
    both = alerts_of(["rss > 1 GB", ("pss > 1 GB", "stop"), Alert("swap > 1")])
    assert [one.action for one in both] == ["log", "stop", "log"]
    assert [one.rule for one in alerts_of(("rss > 1 GB", "pss > 1 GB"))] == [
        "rss > 1 GB",
        "pss > 1 GB",
    ]


def test_a_rule_speaks_when_it_comes_to_be_broken() -> None:
    watch = Watch([Alert("rss > 100")])
    spoke = [
        bool(watch.look(figures(step, host_rss_bytes=rss)))
        for step, rss in enumerate([50, 150, 160, 90, 150])
    ]
    assert spoke == [False, True, False, False, True]


def test_what_is_not_told_for_an_interval_is_not_mended() -> None:
    watch = Watch([Alert("peak > 10 B"), Alert("rss > 1 B for 20 steps"), Alert("steps_left < 9")])
    assert len(watch.look(figures(10, device_allocated_peak_bytes=11, steps_left=8))) == 2
    assert watch.look(figures(20, host_rss_bytes=2)) == []
    assert watch.look(figures(30, device_allocated_peak_bytes=11)) == []
    again = watch.look(figures(40, host_rss_bytes=2, steps_left=8))
    assert [what.rule for _, what in again] == ["rss > 1 B for 20 steps", "steps_left < 9"]


def test_for_so_many_steps() -> None:
    watch = Watch([Alert("growth > 1 KB/step for 50 steps")])
    spoke = {
        step: bool(watch.look(figures(step, host_growth_bytes_per_step=5000)))
        for step in range(10, 91, 10)
    }
    assert [step for step, said in spoke.items() if said] == [60]


def test_what_is_said_names_the_rank() -> None:
    ((_, broken),) = Watch([Alert("headroom < 5%")]).look(figures(410, device_headroom_permille=31))
    assert broken.text == "device_headroom_permille is 3.1 % on rank 2, below 5 % (step 410)"


def test_logging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="tenure"),
        tenure.Monitor(sinks=[], every=1, alerts=["rss > 1 MiB"], folder=tmp_path) as monitor,
    ):
        monitor.step()
        monitor.step()
    said = [record.message for record in caplog.records if "host_rss_bytes" in record.message]
    assert len(said) == 1
    assert "on rank 0, above 1 MiB" in said[0]


def test_a_function_that_fails_does_not_end_the_monitor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(broken: Broken) -> None:
        raise ValueError(broken.rule)

    seen: list[Figures] = []
    with tenure.Monitor(
        sinks=[seen.append],
        every=1,
        alerts=[("rss > 1 MiB", fail), ("rss > 1 MiB", "stop")],
        folder=tmp_path,
    ) as monitor:
        monitor.step()
        with pytest.raises(tenure.MemoryAlert):
            monitor.step()
    assert len(seen) == 2
    assert "alert's function failed" in caplog.text


def stops(rank: int, _world_size: int) -> tuple[int, str, int]:
    called: list[Broken] = []
    monitor = scratch_monitor(
        sinks=[],
        every=2,
        alerts=[("rss > 1 MiB for 4 steps", "stop"), ("rss > 1 MiB", called.append)],
    )
    step = 0
    try:
        for step in range(1, 100):
            if rank == 1 and step == 5:
                time.sleep(0.3)  # behind: the others must not be a step further when they stop
            monitor.step()
    except tenure.MemoryAlert as alert:
        monitor.close()
        return step, str(alert), len(called)
    return 0, "", 0


def test_all_ranks_stop_at_the_same_step() -> None:
    results = run_ranks(stops, 3)
    assert results[0][1].startswith("host_rss_bytes is ")
    assert [result[0] for result in results] == [8, 8, 8]
    assert {result[1] for result in results} == {results[0][1]}
    assert [result[2] for result in results] == [1, 1, 1]


def counts_more_steps(rank: int, _world_size: int) -> int:
    monitor = scratch_monitor(sinks=[], every=1, alerts=("rss > 1 MiB for 4 steps", "stop"))
    for step in range(1, 100):
        try:
            for _ in range(3 if rank == 1 else 1):
                tenure.step()
            monitor.step()
        except tenure.MemoryAlert:
            monitor.close()
            return step
    return 0


def test_for_so_many_steps_is_the_same_step_where_ranks_count_differently() -> None:
    first, second = run_ranks(counts_more_steps, 2)
    assert first == second > 0


def alone(rank: int, _world_size: int) -> list[str]:
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tenure.telemetry").addHandler(listener)
    monitor = scratch_monitor(sinks=[], every=1, alerts=("offloaded > 1 KiB", "stop"))
    monitor.step()
    dist.barrier()
    if rank == 1:
        monitor.close(30)
    dist.barrier()
    if rank != 1:
        monitor.step()
        monitor.step()  # this one knows that they are not together
        with tenure.hold(torch.zeros(512 * rank), "copy", kind="host_copy"):
            for _ in range(4):
                monitor.step()
        monitor.close(30)
    dist.barrier()
    return [line for line in said if "offloaded" in line]


def test_ranks_that_are_not_together_are_not_stopped_one_by_one() -> None:
    others = run_ranks(alone, 3)
    assert [len(said) for said in others] == [0, 0, 1]
    assert others[2][0].endswith("nothing is stopped: the ranks are not together")


def reads(_rank: int, _world_size: int) -> Any:
    monitor = scratch_monitor(sinks=[], every=1, alerts=("rss > 1 TiB", "stop"))
    monitor.step()
    monitor.close()
    latest = monitor.latest
    assert latest is not None
    return set(latest.rows), latest.world["host_rss_bytes"].rank in range(3)


def test_ranks_that_watch_do_not_ask_for_all_rows() -> None:
    """If each rank asked for each one's row, a large job would be at nothing else."""
    assert run_ranks(reads, 3) == [({0, 1, 2}, True), (set(), True), (set(), True)]


def test_the_page_lists_every_key_as_it_is() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/telemetry.md").read_text()
    told = [
        line for line in page.splitlines() if re.match(r"\| `\w+` \| (highest|lowest) \|", line)
    ]
    assert told == [f"| `{key.name}` | {key.extreme} | {key.help} |" for key in KEYS.values()]
