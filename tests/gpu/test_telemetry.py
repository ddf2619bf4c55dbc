"""Telemetry on a real accelerator: what the driver and the allocator say, and a real shortage."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import tenure
from flying import VICTIM, Job
from tenure.report import flights
from tenure.telemetry.figures import Figures

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

MIB = 1 << 20


def told(tmp_path: Path, *steps: object) -> list[Figures]:
    """One interval for each step, which is called before it ends."""
    seen: list[Figures] = []
    with tenure.Monitor(
        sinks=[seen.append], every=1, folder=tmp_path, flight_recorder=False
    ) as monitor:
        for step in steps:
            step()  # type: ignore[operator]
            monitor.step()
    return seen


def test_figures_are_those_of_the_driver_and_the_allocator(tmp_path: Path) -> None:
    keep = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    (one,) = told(tmp_path, lambda: None)
    world = {key: figure.value for key, figure in one.world.items()}
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    assert world["device_allocated_bytes"] == stats["allocated_bytes.all.current"]
    assert world["device_reserved_bytes"] == stats["reserved_bytes.all.current"]
    assert world["device_active_bytes"] == stats["active_bytes.all.current"]
    assert world["device_inactive_bytes"] == stats["inactive_split_bytes.all.current"]
    assert world["device_retries"] == stats["num_alloc_retries"]
    assert world["device_ooms"] == stats["num_ooms"]
    assert world["device_total_bytes"] == total
    assert abs(world["device_free_bytes"] - free) < 64 * MIB
    assert abs(world["device_others_bytes"] - (total - free - world["device_reserved_bytes"])) < (
        64 * MIB
    )
    cached = world["device_reserved_bytes"] - world["device_active_bytes"]
    assert free - 64 * MIB < world["device_headroom_bytes"] <= free + cached
    del keep


def test_the_peak_of_an_interval_is_its_own_and_resets_nothing(tmp_path: Path) -> None:
    def take(mib: int) -> None:
        torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    seen = told(tmp_path, lambda: take(100), lambda: take(400), lambda: take(50), lambda: None)
    assert torch.cuda.max_memory_allocated() == base + 400 * MIB
    tops = [one.world["device_allocated_top_bytes"].value - base for one in seen]
    assert tops[1:] == [400 * MIB] * 3
    peaks = [one.world.get("device_allocated_peak_bytes") for one in seen]
    assert peaks[1] is not None
    assert peaks[1].value == base + 400 * MIB
    if peaks[2] is not None:  # each allocation is traced
        assert [peak.value - base for peak in peaks if peak][2:] == [50 * MIB, 0]


def test_a_user_who_resets_peaks_is_not_mistaken_for_a_fall(tmp_path: Path) -> None:
    def high() -> None:
        torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")

    seen = told(tmp_path, high, torch.cuda.reset_peak_memory_stats, lambda: None)
    tops = [one.world["device_allocated_top_bytes"].value for one in seen]
    assert tops[0] == tops[1] == tops[2] >= 200 * MIB


PROGRAM = """
import sys, torch, tenure

def fill(hoard):
    while True:
        hoard.append(torch.empty(8 << 30, dtype=torch.uint8, device="cuda"))

hoard = []
monitor = tenure.Monitor(sinks=[], every=1, folder=sys.argv[1])
monitor.step()
fill(hoard)
"""


def test_a_real_shortage_leaves_who_held_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(script), str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stderr  # the user's own error stays
    (file,) = run.glob("*.flight.json")
    snapshot = json.loads(file.read_text())
    assert snapshot["headline"]["reason"] == "memory"
    assert snapshot["headline"]["asked"] == 8 << 30
    report = subprocess.run(
        [sys.executable, "-m", "tenure", "report", str(run)],
        capture_output=True,
        text=True,
        check=False,
    )
    first = report.stdout.splitlines()
    print(report.stdout, report.stderr)
    assert "rank 0 ran out of memory" in first[0]
    assert "cuda:0" in first[0]
    assert any("hoard" in line and "train.py" in line for line in first[:4])


def test_one_of_four_ranks_has_a_real_shortage(tmp_path: Path) -> None:
    with Job(tmp_path, "monitored short on a device", 4) as job:
        short = job.snapshot(VICTIM, lambda found: found["headline"]["reason"] == "memory")
        assert job.wait() == [1, 1, 1, 1]
        left = flights.find([job.folder])
    assert short["headline"]["asked"] == 1 << 40
    assert [one.who.rank for one in left] == [VICTIM, 0, 1, 3]
    assert all(one.document["after"]["rank"] == VICTIM for one in left[1:])
    screen = flights.screen(left).splitlines()
    assert screen[0].startswith("rank 2 ran out of memory at step 41: it asked for 1,099,511.6 MB")
    assert "more than the" in screen[0]
    assert "cuda:0" in screen[0]
    assert screen[1].strip().startswith("hoard")
    assert "held 10,737.4 MB in 10 storages, kept at flying.py:" in screen[1]
