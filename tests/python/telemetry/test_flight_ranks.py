"""The flight recorder on real ranks: one runs out of memory, is killed or ended; all leave word."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flying import VICTIM, Job
from tenure.cli import app


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def first_screen(folder: Path) -> list[str]:
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def top_of(folder: Path) -> list[str]:
    result = CliRunner().invoke(app, ["top", str(folder), "--once"], env={"COLUMNS": "240"})
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def resident_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def is_of_signal(found: dict[str, Any]) -> bool:
    return bool(found["headline"]["reason"] == "signal")


def is_told(found: dict[str, Any]) -> bool:
    return found["headline"]["reason"] == "told" and found["headline"]["text"] != ""


def test_one_rank_runs_out_of_memory_while_the_others_are_in_a_collective(tmp_path: Path) -> None:
    with Job(tmp_path, "short", 4) as job:
        short = job.snapshot(VICTIM, lambda found: found["headline"]["reason"] == "memory")
        others = [job.snapshot(rank, is_told) for rank in (0, 1, 3)]
        codes = job.wait()
        screen = first_screen(job.folder)

    assert codes == [1, 1, 1, 1]
    told = short["headline"]
    assert told["asked"] == 1_000_000_000
    assert 0 < told["over"] == told["asked"] - told["free"]
    assert "ulimit -d" in told["limit"]
    assert short["step"] == 41
    top = short["holders"]["held"][0]
    assert top["text"].startswith("hoard")
    assert top["bytes"] >= 10 * (16 << 20)
    assert top["site"].startswith("flying.py:")
    assert "_run_short" in short["trace"][-1]
    assert short["samples"] == [{"step": 41}]

    assert [other["whole"] for other in others] == [True, False, False]
    assert all(other["after"]["rank"] == VICTIM for other in others)

    assert screen[0].startswith(
        "rank 2 ran out of memory at step 41: it asked for 1,000.0 MB on cpu"
    )
    assert "more than the" in screen[0]
    assert "hoard" in screen[1]
    assert "kept at flying.py:" in screen[1]
    assert "you tried to allocate 1000000000 bytes" in job.log(
        VICTIM
    )  # the program's own error is seen
    assert [line.split()[0] for line in screen if line[:6].strip().isdigit()] == [
        "2",
        "0",
        "1",
        "3",
    ]


def test_a_live_job_is_asked_and_then_a_rank_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path, "wait", 4) as job:
        job.wait_for_key(*(f"ready {rank}" for rank in range(4)))
        asked = CliRunner().invoke(app, ["dump", str(job.folder), "--timeout", "180"])
        assert asked.exit_code == 0, asked.output
        assert len(asked.output.splitlines()) == 4
        assert not list(job.folder.glob("dump.request*"))
        assert "snapshots of 4 ranks" in first_screen(job.folder)[0]
        assert [process.poll() for process in job.ranks] == [None] * 4

        job.ranks[VICTIM].send_signal(signal.SIGKILL)
        codes = job.wait()
        screen = first_screen(job.folder)
        gone = CliRunner().invoke(app, ["dump", str(job.folder)])

    assert codes == [1, 1, -9, 1]
    assert screen[0].startswith(
        "rank 2 left no word: it was killed, or ended at once; its last sample (step 41"
    )
    assert "s before the others stopped): 123.0 MB resident, 1.0 MB left on the host" in screen[0]
    assert gone.exit_code == 2
    assert "no live job" in gone.output


def test_a_monitored_rank_runs_out_of_memory(tmp_path: Path) -> None:
    with Job(tmp_path, "monitored short", 4) as job:
        short = job.snapshot(VICTIM, lambda found: found["headline"]["reason"] == "memory")
        others = [job.snapshot(rank, is_told) for rank in (0, 1, 3)]
        assert job.wait() == [1, 1, 1, 1]
        screen = first_screen(job.folder)
    assert all(other["after"]["rank"] == VICTIM for other in others)
    assert [row["step"] for row in short["samples"]] == list(range(1, 42))
    grown = short["host_memory"]["rss_bytes"] - short["samples"][-1]["host_rss_bytes"]
    assert grown > 9 * (16 << 20), "what it took after the last sample"
    assert screen[0].startswith("rank 2 ran out of memory at step 41: it asked for 1,000.0 MB")
    assert "hoard" in screen[1]


def test_a_monitored_rank_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path, "monitored wait", 4) as job:
        job.wait_for_key(*(f"ready {rank}" for rank in range(4)))
        rss = resident_of(job.ranks[VICTIM].pid)
        before = top_of(job.folder)
        job.ranks[VICTIM].send_signal(signal.SIGKILL)
        assert job.wait() == [1, 1, -9, 1]
        screen = first_screen(job.folder)
        after = top_of(job.folder)
    assert any(line.startswith("4 ranks: 4 running; step 41") for line in before), before
    assert [
        line.split()[:2] for line in before if " running " in line and "parameters" in line
    ] == [[str(rank), "running"] for rank in range(4)]
    assert after[0].startswith("rank 2 "), after
    assert " died after step 41" in after[0]
    said = re.match(
        r"rank 2 left no word: it was killed, or ended at once; its last sample \(step 41.*"
        r": ([\d.]+) MB resident",
        screen[0],
    )
    assert said, screen[0]
    assert float(said[1]) == pytest.approx(rss / 1e6, rel=0.05)
    assert screen[1].startswith("  parameters held 4.2 MB, the most of all owners")


def test_sigterm_inside_a_collective_writes_and_then_ends_the_rank(tmp_path: Path) -> None:
    with Job(tmp_path, "wait", 2) as job:
        job.wait_for_key("ready 0", "ready 1")
        job.ranks[0].send_signal(signal.SIGTERM)
        ended = job.snapshot(0, lambda found: is_of_signal(found) and found["whole"])
        job.snapshot(1, is_told)
        assert job.wait(0) == [-15]
        screen = first_screen(job.folder)
    assert any("all_reduce" in frame for frame in ended["stacks"][0]["frames"])
    assert screen[0] == "rank 0 was ended by SIGTERM at step 41"


def test_sigterm_reaches_the_handler_that_was_there_when_the_collective_ends(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, "handler", 2) as job:
        job.wait_for_key("ready 0", "ready 1")
        job.ranks[0].send_signal(signal.SIGTERM)
        job.snapshot(0, is_of_signal)
        assert job.ranks[0].poll() is None
        job.store.set("go", "")
        assert job.wait(0) == [7]
        assert "the program's own handler ran" in job.log(0)


def test_a_rank_whose_gil_is_kept_leaves_what_is_known_without_it(tmp_path: Path) -> None:
    with Job(tmp_path, "gil", 2) as job:
        job.wait_for_key("ready 0", "ready 1")
        job.ranks[1].send_signal(signal.SIGTERM)
        told = job.snapshot(0, lambda found: found["headline"]["reason"] == "told")
        assert job.wait(1) == [-15]
        assert job.ranks[0].poll() is None, "it is at its call yet"
        rss = resident_of(job.ranks[0].pid)
        began = time.monotonic()
        job.ranks[0].send_signal(signal.SIGTERM)
        assert job.wait(0) == [-15]
        took = time.monotonic() - began
        screen = first_screen(job.folder)
    assert told["step"] == 41
    assert told["host_memory"]["rss_bytes"] == pytest.approx(rss, rel=0.05)
    assert not {"holders", "stacks", "samples"} & told.keys(), "what needs the GIL"
    assert 2 < took < 30, "three seconds were given to a fuller snapshot"
    assert screen[0] == "rank 1 was ended by SIGTERM at step 41"


def test_ranks_hear_of_each_other_when_the_stores_host_is_gone(tmp_path: Path) -> None:
    with Job(tmp_path, "orphaned", 4) as job:
        job.wait_for_key("asks the store no more")
        job.host.kill()
        job.host.wait()
        (job.folder / "go").touch()
        failed = job.snapshot(VICTIM, lambda found: found["headline"]["reason"] == "exception")
        others = [job.snapshot(rank, is_told) for rank in (0, 1, 3)]
        (job.folder / "end").touch()
        job.wait()
        screen = first_screen(job.folder)
    assert failed["headline"]["text"] == "ValueError: this rank has had enough"
    assert all(other["after"]["rank"] == VICTIM for other in others)
    assert screen[0] == "rank 2 failed at step 41: ValueError: this rank has had enough"
