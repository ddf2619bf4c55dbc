"""`tenure top` in words: the worst rank first, rows that fit, and answers to bad input."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tenure import _C
from tenure.telemetry.rings import Identity, Ring, Rings
from tenure.telemetry.standing import COLUMNS, headline, in_order, standing, summary
from tenure.telemetry.top import Request, frame, run

GIB = 2**30
MIB = 2**20
TENURE = str(Path(sys.executable).with_name("tenure"))


def ring(rank: int, ranks: int = 4, state: str = "running", **figures: int) -> Ring:
    who = Identity("node7", rank, ranks, rank % 2, 2, "trainer", 0, 100 + rank, 1, "", "")
    row = {"step": 120, "when": 1, **figures}
    closed = {"ended": "ended", "failed": "failed: ValueError: no such layer"}.get(state)
    return Ring(Path(f"{rank}.ring"), who, {}, [row], 1, state, closed, 42.0)


def text_of(shown: Any, width: int = 400) -> str:
    console = Console(file=io.StringIO(), width=width, height=30, highlight=False)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def headroom(left: int, total: int = 80 * GIB) -> dict[str, int]:
    return {"device_headroom_bytes": left, "device_headroom_permille": 1000 * left // total}


@pytest.mark.parametrize(
    ("rings", "said"),
    [
        (
            [ring(0, host_rss_bytes=2 * GIB), ring(1, host_rss_bytes=3 * GIB)],
            "rank 1 (stage 1, node7) has the most memory: memory 3.0 GiB",
        ),
        (
            [ring(0, **headroom(40 * GIB)), ring(1, **headroom(4 * GIB))],
            "rank 1 (stage 1, node7) has the least headroom: headroom 4.0 GiB (5.0 %)",
        ),
        (
            [
                ring(0, **headroom(4 * GIB)),
                ring(
                    2,
                    **headroom(8 * GIB),
                    device_reserved_bytes=72 * GIB,
                    device_growth_bytes_per_step=3 * MIB,
                    steps_left=2600,
                    steps_left_earliest=2100,
                    steps_left_latest=3400,
                ),
            ],
            (
                "rank 2 (stage 0, node7) will be out of memory in about 2,600 steps "
                "(2,100 to 3,400): memory 72.0 GiB, headroom 8.0 GiB (10.0 %), "
                "growing 3.0 MiB a step"
            ),
        ),
        (
            [ring(0, state="silent"), ring(1, state="failed"), ring(2, state="ended")],
            "rank 1 (stage 1, node7) failed after step 120 (ValueError: no such layer)",
        ),
        (
            [ring(0, steps_left=1), ring(1, state="died", host_rss_bytes=GIB)],
            "rank 1 (stage 1, node7) died after step 120: memory 1.0 GiB",
        ),
        (
            [ring(0), ring(1, state="silent", host_rss_bytes=GIB)],
            "rank 1 (stage 1, node7) is silent for 42 s after step 120: memory 1.0 GiB",
        ),
        (
            [
                ring(
                    0,
                    device_allocated_bytes=GIB,
                    device_growth_bytes_per_step=0,
                    host_growth_bytes_per_step=MIB,
                )
            ],
            (
                "rank 0 (stage 0, node7) has the most memory: memory 1.0 GiB, growing 1.0 MiB "
                "a step (host)"
            ),
        ),
    ],
)
def test_the_first_line_names_the_worst_rank(rings: list[Ring], said: str) -> None:
    assert headline([standing(one) for one in rings]) == said


def test_a_row_tells_all_that_a_rank_told() -> None:
    full = ring(
        1,
        device_allocated_bytes=10 * GIB,
        device_reserved_bytes=12 * GIB,
        device_allocated_top_bytes=11 * GIB,
        bound_bytes=13 * GIB,
        host_rss_bytes=5 * GIB,
        parameters_bytes=2 * GIB,
        optimizer_bytes=4 * GIB,
        activations_bytes=GIB,
        device_growth_bytes_per_step=-MIB,
        **headroom(68 * GIB),
    )
    (one,) = [standing(full)]
    told = {column.title: column.text(one) for column in COLUMNS}
    assert told == {
        "rank": "1",
        "stage": "1",
        "role": "trainer",
        "host": "node7",
        "step": "120",
        "allocated": "10.0 GiB",
        "reserved": "12.0 GiB",
        "peak": "11.0 GiB",
        "bound": "13.0 GiB",
        "headroom": "68.0 GiB (85.0 %)",
        "host RSS": "5.0 GiB",
        "largest owners": "optimizer 4.0 GiB, parameters 2.0 GiB",
        "growth/step": "-1.0 MiB",
        "state": "running",
    }


def test_of_headrooms_the_tighter_one_is_told() -> None:
    tight = {"host_headroom_bytes": MIB, "host_headroom_permille": 2}
    assert standing(ring(0, **headroom(GIB), **tight)).headroom == MIB


def test_the_orders() -> None:
    ranks = [
        standing(ring(0, host_rss_bytes=1, host_growth_bytes_per_step=5, **headroom(9 * GIB))),
        standing(ring(1, host_rss_bytes=3, host_growth_bytes_per_step=7, **headroom(8 * GIB))),
        standing(ring(2, host_rss_bytes=2, host_growth_bytes_per_step=6, **headroom(1 * GIB))),
    ]
    orders = {"rank": [0, 1, 2], "memory": [1, 2, 0], "headroom": [2, 1, 0], "growth": [1, 2, 0]}
    for sort, order in orders.items():
        assert [one.rank for one in in_order(ranks, sort, 10)] == order
    assert [one.rank for one in in_order(ranks, "rank", 2)] == [2, 1]  # the worst, for lack of room


def test_columns_go_until_the_others_fit() -> None:
    ranks = [
        standing(
            ring(
                rank,
                device_allocated_bytes=10 * GIB,
                device_reserved_bytes=12 * GIB,
                host_rss_bytes=GIB,
                optimizer_bytes=GIB,
                **headroom(GIB),
            )
        )
        for rank in range(4)
    ]
    for width in (60, 80, 100, 120, 160):
        lines = text_of(frame(ranks, "rank", 10, width), width).splitlines()
        titles, *rows = lines[-5:]
        assert len(rows) == 4
        assert max(map(len, lines[-5:])) <= width
        for title in ("rank", "step", "headroom", "state"):
            assert title in titles
        assert ("largest owners" in titles) == (width >= 100)
        assert "bound" not in titles  # nobody has told one


def test_what_a_file_says_is_not_a_command_to_the_terminal() -> None:
    evil = ring(0, host_rss_bytes=1)
    who = Identity("\x1b[2J[red]x", 0, 4, 0, 2, "a\nb", 0, 1, 1, "", "")
    shown = text_of(frame([standing(Ring(**(vars(evil) | {"identity": who})))], "rank", 5))
    assert "\x1b" not in shown
    assert "[red]x" in shown
    assert "a b" in shown


def test_16384_ranks_are_shown_in_well_under_a_second() -> None:
    rings = [
        ring(rank, 16384, host_rss_bytes=rank, **headroom(GIB + rank)) for rank in range(16384)
    ]
    begin = time.process_time()
    shown = text_of(frame([standing(one) for one in rings], "rank", 20, 120), 120)
    assert time.process_time() - begin < 1.0
    assert "16,384 ranks: 16,384 running; step 120" in shown
    assert "and 16,364 more (the worst first)" in shown
    assert len(shown.splitlines()) == 24


def test_two_thousand_rings_are_read_quickly(tmp_path: Path) -> None:
    kept = []
    for rank in range(2000):
        one = _C.TelemetryRing(str(tmp_path), host="n", rank=rank, ranks=2000, slots=4)
        one.append(3, {"host_rss_bytes": rank})
        kept.append(one)
    rings = Rings(tmp_path)
    begin = time.process_time()
    found = rings.look(last=2)
    first = time.process_time() - begin
    again = rings.look(last=2)
    assert [one.identity.rank for one in found] == list(range(2000))
    assert [one.rows[-1]["host_rss_bytes"] for one in again] == list(range(2000))
    assert first < 2.0
    assert summary([standing(one) for one in found]) == "2,000 ranks: 2,000 running; step 3"


def test_ranks_that_have_not_come_yet_are_counted() -> None:
    ranks = [standing(ring(0, 8)), standing(ring(1, 8, state="died"))]
    assert summary(ranks) == "2 of 8 ranks: 1 running, 1 died; step 120"


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TENURE, "top", *arguments], capture_output=True, text=True, **options)


def test_one_table_where_output_is_no_terminal(tmp_path: Path) -> None:
    one = _C.TelemetryRing(str(tmp_path / "run.tenure"), host="node7", rank=0, ranks=1)
    one.append(5, {"host_rss_bytes": GIB})
    done = command(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "rank 0 (node7) has the most memory: memory 1.0 GiB"
    assert lines[1] == "1 rank: 1 running; step 5"
    assert lines[2].split() == ["rank", "state", "host", "step", "host", "RSS"]
    assert lines[3].split() == ["0", "running", "node7", "5", "1.0", "GiB"]


def test_a_damaged_ring_is_told_below_the_others(tmp_path: Path) -> None:
    one = _C.TelemetryRing(str(tmp_path), host="node7", rank=0, ranks=1)
    one.append(5, {"host_rss_bytes": GIB})
    (tmp_path / "x-1-2-3.ring").write_bytes(b"junk")
    (tmp_path / "x-1-2-4.ring").write_bytes(b"junk")
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    assert run(Request(str(tmp_path), once=True), console) == 0
    last = shown.getvalue().splitlines()[-1]
    assert "is no ring of samples, and 1 other file" in last


@pytest.mark.parametrize("how", [["--once"], ["--web"]])
def test_no_such_folder(tmp_path: Path, how: list[str]) -> None:
    done = command("absent", *how, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tenure: there is no folder absent: ")
    assert done.stderr.count("\n") == 1


def test_nothing_there_yet(tmp_path: Path) -> None:
    done = command(".", "--once", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("no rank has written to . yet: ")


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    one = _C.TelemetryRing(str(tmp_path), host="node7", rank=0, ranks=1)
    one.append(5, {"host_rss_bytes": GIB})
    script = (
        "import sys; sys.argv = ['tenure', 'top', '--once', sys.argv[1]]\n"
        "import tenure.cli\n"
        "try: tenure.cli.main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "import tenure.telemetry.web\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
