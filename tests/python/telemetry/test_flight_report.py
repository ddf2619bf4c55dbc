"""`tenure report` and `tenure dump` on what jobs have left, as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tenure import _C
from tenure.cli import app
from tenure.telemetry.presence import Presence, is_alive, this_process

MEMORY = {
    "reason": "memory",
    "text": "RuntimeError: no room",
    "fatal": True,
    "device": "cuda:0",
    "asked": 3_000_000_000,
    "free": 1_000_000_000,
    "over": 2_000_000_000,
    "limit": "the memory of cuda:0",
}
HELD = {"held": [{"text": "cache (global of train)", "bytes": 9e9, "count": 96, "site": "a.py:7"}]}


def rank(number: int, ranks: int = 4, began: float = 1000.0, host: str = "node") -> Presence:
    return Presence(host, number, ranks, 0, 1, 100 + number, 0, began, 1)


def leave(folder: Path, who: Presence, headline: dict[str, Any], **more: Any) -> None:
    told = {**who.as_json(), "time": who.began + 50, "step": 41, "whole": True}
    text = json.dumps({**told, "headline": headline, **more})
    who.file(folder, ".flight.json").write_text(text)


def report(*folders: Path, code: int = 0) -> list[str]:
    out = folders[0].parent / "page.html"
    result = CliRunner().invoke(app, ["report", *map(str, folders), "--out", str(out)])
    assert result.exit_code == code, result.output
    return result.output.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def test_the_rank_that_ran_out_comes_before_those_that_failed_of_it(folder: Path) -> None:
    leave(folder, rank(0), {"reason": "exception", "text": "RuntimeError: closed", "fatal": True})
    leave(folder, rank(2), MEMORY, time=1060.0, holders=HELD, trace=["train.py:5 in step"])
    leave(folder, rank(1), {"reason": "told", "text": "rank 2: no room"}, whole=False)
    screen = report(folder)
    assert screen[:4] == [
        (
            "rank 2 ran out of memory at step 41: it asked for 3,000.0 MB on cuda:0, 2,000.0 MB "
            "more than the 1,000.0 MB that the memory of cuda:0 left"
        ),
        "  cache (global of train) held 9,000.0 MB in 96 storages, kept at a.py:7",
        "  at train.py:5 in step",
        "  RuntimeError: no room",
    ]
    assert any("stopped after rank 2: no room (a row)" in line for line in screen)
    assert "left nothing, having ended before or never begun: rank 3" in screen
    page = (folder.parent / "page.html").read_text()
    assert "cache (global of train)" in page
    assert "http" not in page


def test_the_first_of_several_failures_leads(folder: Path) -> None:
    failure = {"reason": "exception", "fatal": True}
    leave(folder, rank(0), {**failure, "text": "RuntimeError: closed"}, time=1002.0)
    leave(folder, rank(1), {**failure, "text": "ValueError: no layer"}, time=1001.0)
    assert report(folder)[0] == "rank 1 failed at step 41: ValueError: no layer"


def test_a_dump_does_not_hide_a_shortage_that_a_rank_survived(folder: Path) -> None:
    asked = {"reason": "request", "text": "tenure dump"}
    earlier = {"rank": 2, "time": 1020.0, "step": 17, "headline": MEMORY, "holders": HELD}
    leave(folder, rank(0), asked, host_memory={"rss_bytes": 9e9})
    leave(folder, rank(2), asked, host_memory={"rss_bytes": 1e9}, earlier=earlier)
    screen = report(folder)
    assert screen[0].startswith("rank 2 ran out of memory at step 17: it asked for 3,000.0 MB")
    assert screen[0].endswith(
        "and went on; since then snapshots of 2 ranks; rank 0 has most memory, 9,000.0 MB"
    )
    assert screen[1] == "  cache (global of train) held 9,000.0 MB in 96 storages, kept at a.py:7"
    (line,) = (one for one in screen if one.split()[:1] == ["2"])
    assert "ran out of memory at step 17, and went on; asked: tenure dump" in line
    assert "cache (global of train)" in (folder.parent / "page.html").read_text()


def test_a_rank_that_caught_its_shortage_and_ended_comes_before_those_that_missed_it(
    folder: Path,
) -> None:
    closed = {"reason": "exception", "text": "RuntimeError: connection closed", "fatal": True}
    leave(folder, rank(0), closed, time=1050.0)
    leave(folder, rank(2), {**MEMORY, "text": "", "fatal": False}, time=1049.0, holders=HELD)
    screen = report(folder)
    assert screen[0].startswith("rank 2 ran out of memory at step 41: it asked for 3,000.0 MB")
    assert "went on" not in "".join(screen)
    assert screen[1].startswith("  cache (global of train) held 9,000.0 MB")


def test_a_shortage_of_long_before_explains_nothing(folder: Path) -> None:
    closed = {"reason": "exception", "text": "RuntimeError: connection closed", "fatal": True}
    leave(folder, rank(0), closed, time=1050.0)
    leave(folder, rank(2), {**MEMORY, "text": "", "fatal": False}, time=980.0)
    screen = report(folder)
    assert screen[0] == "rank 0 failed at step 41: RuntimeError: connection closed"
    assert any("ran out of memory, and went on" in line for line in screen)


def test_a_rank_on_another_host_left_no_word_if_others_failed(folder: Path) -> None:
    rank(3).write(folder)
    leave(folder, rank(0), {"reason": "exception", "text": "RuntimeError: closed", "fatal": True})
    assert report(folder)[0].startswith("rank 3 left no word: it was killed, or ended at once")


def test_nothing_is_said_to_have_died_where_that_cannot_be_seen(folder: Path) -> None:
    rank(3).write(folder)
    assert report(folder, code=2)[0].endswith("give a folder that `tenure run` made")


def test_earlier_runs_in_the_folder_are_left_out(folder: Path) -> None:
    leave(folder, rank(2, began=1000.0), MEMORY)
    failure = {"reason": "exception", "text": "ValueError: new", "fatal": True}
    leave(folder, rank(0, began=9000.0, host="other"), failure)
    screen = report(folder)
    assert screen[0] == "rank 0 failed at step 41: ValueError: new"
    assert not any("memory on" in line for line in screen)


def test_what_a_rank_left_that_went_on_since_is_past(folder: Path) -> None:
    leave(folder, rank(0), MEMORY)
    leave(folder, rank(1), {"reason": "told", "text": "rank 0: no room"})
    _C.TelemetryRing(str(folder), host="node", rank=0, ranks=4).close()
    assert report(folder)[0] == "rank 1 stopped at step 41 after rank 0: no room"
    _C.TelemetryRing(str(folder), host="node", rank=1, ranks=4).close()
    assert report(folder, code=2)[0].endswith("give a folder that `tenure run` made")


def with_ring(folder: Path, who: Presence, step: int, closed: str = "") -> None:
    """Its ring: a row that is younger than any snapshot here; left open unless it was closed."""
    ring = _C.TelemetryRing(str(folder), host=who.host, rank=who.rank, ranks=who.ranks)
    ring.append(step, {"host_rss_bytes": 7 << 30}, when=int((who.began + 90) * 1e9))
    if closed:
        ring.close(closed)
    made = Path(ring.path)
    made.rename(who.file(folder, ".ring"))


def test_who_went_on_after_a_failure_is_not_led_by_it(folder: Path) -> None:
    caught = {"reason": "exception", "text": "ValueError: caught", "fatal": True}
    told = {"reason": "told", "text": "rank 1: ValueError: caught"}
    after = {"rank": 1, "text": "ValueError: caught", "time": 1050.0}
    for number in (0, 2):
        leave(folder, rank(number), told, after=after)
    leave(folder, rank(1), caught)
    rank(2).write(folder)  # it never said that it left: it was killed
    with_ring(folder, rank(0), 60, "failed: RuntimeError: connection reset")
    with_ring(folder, rank(1), 60, "failed: RuntimeError: connection reset")
    with_ring(folder, rank(2), 60)
    leave(folder, rank(3), {"reason": "exception", "text": "RuntimeError: reset", "fatal": True})
    screen = report(folder)
    assert screen[0].startswith("rank 2 left no word: it was killed, or ended at once; its last")
    (line,) = (one for one in screen if one.split()[:1] == ["1"])
    assert line.endswith(
        "ValueError: caught at step 41, and went on; RuntimeError: connection reset"
    )


def test_a_run_that_ended_well_is_not_said_to_have_failed(folder: Path) -> None:
    leave(folder, rank(1), {"reason": "exception", "text": "ValueError: caught", "fatal": True})
    after = {"rank": 1, "text": "ValueError: caught", "time": 1050.0}
    leave(folder, rank(0), {"reason": "told", "text": "rank 1: ValueError: caught"}, after=after)
    for number in (0, 1):
        with_ring(folder, rank(number), 60, "ended")
    screen = report(folder)
    assert screen[0] == "rank 1 failed at step 41: ValueError: caught, and went on"
    (line,) = (one for one in screen if one.split()[:1] == ["0"])
    assert line.split()[-1] == "ended"


def test_a_ring_that_says_of_what_it_ended_is_enough(folder: Path) -> None:
    with_ring(folder, rank(0), 60, "failed: OSError: no space left")
    with_ring(folder, rank(1), 60, "ended")
    screen = report(folder)
    assert screen[0] == "rank 0 failed at step 60: OSError: no space left"
    assert "OSError" in (folder.parent / "page.html").read_text()


def test_the_folder_of_tenure_train_is_one_too(folder: Path) -> None:
    (folder / "memory").mkdir()
    leave(folder / "memory", rank(2), MEMORY)
    assert report(folder)[0].startswith("rank 2 ran out of memory at step 41")


def test_damaged_files_do_not_hide_others(folder: Path) -> None:
    leave(folder, rank(0), MEMORY)
    rank(1).file(folder, ".flight.json").write_text("{")
    rank(2).file(folder, ".flight.json").write_text("[]")
    assert report(folder)[0].startswith("rank 0 ran out of memory")


def test_names_cannot_speak_to_the_terminal(folder: Path) -> None:
    leave(folder, rank(0), {"reason": "exception", "text": "\x1b[2J", "fatal": True})
    assert "\x1b" not in "".join(report(folder))


def test_a_dump_needs_a_live_job(folder: Path) -> None:
    gone = this_process(0, 1, 0, 1).as_json() | {"started": 1}
    Presence.of(gone).write(folder)
    for place in (folder, folder / "none"):
        result = CliRunner().invoke(app, ["dump", str(place)])
        assert result.exit_code == 2
        assert len(result.output.splitlines()) == 1
    assert not (folder / "dump.request").exists()


def test_a_dump_waits_for_no_rank_of_an_earlier_run_on_another_host(folder: Path) -> None:
    rank(0, ranks=8).write(folder)
    rank(7, ranks=8).write(folder)
    this_process(0, 1, 0, 1).write(folder)  # without a recorder
    result = CliRunner().invoke(app, ["dump", str(folder), "--timeout", "0.3"])
    assert "no snapshot within 0.3 s: rank 0\n" in result.output


def test_a_rank_in_another_container_with_this_hosts_name_may_live(folder: Path) -> None:
    me = this_process(0, 1, 0, 1)
    elsewhere = replace(me, machine="another", started=1)
    assert is_alive(me)
    assert is_alive(replace(me, started=1)) is False
    assert is_alive(elsewhere) is None
    elsewhere.write(folder)
    result = CliRunner().invoke(app, ["dump", str(folder), "--timeout", "0.3"])
    assert result.exit_code == 1, "it was asked"


def test_a_dump_says_who_did_not_answer(folder: Path) -> None:
    this_process(0, 1, 0, 1).write(folder)  # without a recorder
    result = CliRunner().invoke(app, ["dump", str(folder), "--timeout", "0.3"])
    assert result.exit_code == 1
    assert "no snapshot within 0.3 s: rank 0" in result.output
    assert not (folder / "dump.request").exists()
