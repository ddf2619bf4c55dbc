"""Many ranks: who is traced, what the others leave, and one verdict from all recordings."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from forks import run_forked
from tenure.errors import InputError
from tenure.inspect import crowd, recordings, verdicts
from tenure.inspect.evidence import Evidence
from tenure.inspect.options import SUMMARY, Options, environment, parse_ranks
from watched import ROOT, tenure_here, tenure_run

# Until rank 3, which keeps what it makes, has been traced for half as long as it was counted.
JOB = """
import time
import torch
import torch.distributed as dist
from tenure import _C

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def main():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    steps, traced = 0, None
    end = torch.zeros(1)
    until = time.monotonic() + 60
    while not end.item():
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if dist.get_rank() == 3:
            kept.append(torch.ones(2500))
            if traced is None and _C.observed_level() == "trace":
                traced = steps
            late = time.monotonic() > until
            end[0] = late or (traced is not None and steps > 1.5 * traced + 50)
        dist.broadcast(end, src=3)


main()
dist.destroy_process_group()
"""


@dataclass
class Job:
    """How the job of four ranks ended."""

    folder: Path
    said: str
    files: dict[int, Path]  # by rank

    def ask(self, rank: int, sql: str) -> list[tuple[str, ...]]:
        with sqlite3.connect(self.files[rank]) as connection:
            return connection.execute(sql).fetchall()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(JOB)
    out = folder / "run.tenure"
    watched = environment(Options(out=str(out), many=2, run="one"), os.environ)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ended = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=180,
        env=os.environ | watched | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    files = {}
    for path in recordings.files_in([out]):
        meta = recordings.find([path]).meta[path]
        if "env LOCAL_RANK" in meta:  # not the launcher
            files[int(meta["rank"])] = path
    return Job(out, ended.stderr, files)


def test_one_rank_a_stage_is_traced_and_the_one_that_grows(job: Job) -> None:
    level = "SELECT value FROM meta WHERE key='level'"
    found = {rank: job.ask(rank, level)[0][0] for rank in sorted(job.files)}
    assert found == {0: "trace", 1: "count", 2: "trace", 3: "trace"}
    notes = "SELECT text FROM notes WHERE kind='stepped up'"
    assert job.ask(0, notes) == []  # from the beginning
    assert "lowest rank of its stage" in job.ask(2, notes)[0][0]
    ((why,),) = job.ask(3, notes)
    assert "the median of 4 ranks by 0: from now on each storage is traced" in why


def test_who_holds_what_grows_on_the_one_is_named(job: Job) -> None:
    verdict = recordings.judge([job.folder])
    assert verdict["verdict"] == "leak", job.said
    assert {rank["rank"]: rank["verdict"] for rank in verdict["ranks"]}[3] == "leak"
    assert {suspect["rank"] for suspect in verdict["suspects"]} == {3}
    assert "kept (local of main)" in str(verdict["suspects"][0]["holders"])
    # Rank 0 may have spoken before the others ended; recordings have all of them.
    assert "on rank 3 of 4, stage 1, dp 1" in verdicts.first_screen(verdict)
    assert "1 rank only counted" in job.said
    # Its rows go on where it was counted.
    ((first, last, rows),) = job.ask(3, "SELECT min(step), max(step), count(*) FROM steps")
    assert last - first + 1 >= rows > 60


def test_what_is_alive_is_counted_once_before_and_after(job: Job) -> None:
    # Adopting storages that were counted changes what is held by rounding alone.
    held = [row[0] for row in job.ask(3, "SELECT held FROM steps ORDER BY step")]
    rises = [b - a for a, b in pairwise(held)]
    assert max(map(abs, rises[5:])) < 100_000
    assert held[-1] > 0.9 * 10_000 * len(held)


def test_a_counted_rank_leaves_a_summary(job: Job) -> None:
    assert job.files[1].stat().st_size <= SUMMARY
    assert job.ask(1, "SELECT count(*) FROM storages") == [(0,)]


def test_nothing_else_is_left_in_the_folder(job: Job) -> None:
    assert [path for path in job.folder.iterdir() if path.suffix != ".sqlite"] == []


PLACES: list[tuple[dict[str, str], str, str]] = [
    ({}, "", "trace"),
    ({"RANK": "5", "WORLD_SIZE": "16"}, "", "trace"),
    ({"RANK": "5", "WORLD_SIZE": "17"}, "", "count"),
    ({"RANK": "0", "WORLD_SIZE": "2048"}, "", "trace"),
    ({"RANK": "9", "WORLD_SIZE": "2048", "ROLE_NAME": "rollout", "ROLE_RANK": "0"}, "", "trace"),
    ({"SLURM_PROCID": "9", "SLURM_NTASKS": "2048"}, "", "count"),
    ({"RANK": "9", "WORLD_SIZE": "2048"}, "all", "trace"),
    ({"RANK": "9", "WORLD_SIZE": "2048"}, "0,8-15", "trace"),
    ({"RANK": "0", "WORLD_SIZE": "2048"}, "8-15", "count"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "0", "count"),
]


@pytest.mark.parametrize(("given", "ranks", "level"), PLACES)
def test_how_a_rank_begins(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], ranks: str, level: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    begins = crowd.at_first(Options(out="/somewhere", ranks=ranks))
    assert begins.level == level
    assert begins.cap == (SUMMARY if level == "count" else Options.cap)


def test_the_lowest_of_its_stage() -> None:
    assert crowd.represents({"stage": 3, "dp": 0, "tp": 0})
    assert crowd.represents({"dp": 0})
    assert not crowd.represents({"stage": 0, "dp": 1})
    assert not crowd.represents({})


def test_ranks_of_the_users(tmp_path: Path) -> None:
    assert parse_ranks("all") is None
    assert parse_ranks("0, 8-10") == {0, 8, 9, 10}
    for wrong in ("", "x", "3-1", "-1", "1-", "1,,2", "0-99999999999"):
        with pytest.raises(InputError, match="names no ranks: write 0,8-15 or all"):
            parse_ranks(wrong)
    (tmp_path / "job.py").write_text("")
    ended = run_forked(["-m", "tenure", "run", "--ranks", "some", "job.py"], cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == "tenure: 'some' names no ranks: write 0,8-15 or all\n"


def test_a_rank_that_is_not_named_is_counted(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import torch, tenure\nfor _ in range(20): tenure.step()\n")
    run = tenure_run(["job.py"], tmp_path, "--ranks", "0-3", RANK="4", WORLD_SIZE="5")
    assert run.code == 0, run.err
    assert run.verdict["ranks"][0]["level"] == "count"


def wait_for(there: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not there() and time.monotonic() < until:
        time.sleep(0.02)
    return there()


@pytest.fixture
def crowds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., crowd.Crowd]]:
    made = []

    def leave(rank: int, growth: int, step: int = 20, **place: int) -> crowd.Crowd:
        monkeypatch.setenv("RANK", str(rank))
        one = crowd.Crowd(Options(out=str(tmp_path)))
        one.leave(step, growth, place)
        made.append(one)
        return one

    yield leave
    for one in made:
        one.end()
    assert list(tmp_path.iterdir()) == []


def test_only_the_one_beyond_the_median_is_called(crowds: Callable[..., crowd.Crowd]) -> None:
    others = [crowds(rank, 100_000 + rank) for rank in range(6)]
    one = crowds(6, 900_000)
    assert wait_for(lambda: bool(one.called))
    assert "grows by 900,000 bytes a step, the median of" in one.called
    assert not [other.called for other in others if other.called]


def test_a_stage_is_its_own_measure(crowds: Callable[..., crowd.Crowd]) -> None:
    # All of stage 1 leak: its lowest rank is traced anyway, and tells of them all.
    for rank in range(4):
        crowds(rank, 0, stage=0)
    leaking = [crowds(rank, 500_000, stage=1) for rank in range(4, 8)]
    one = crowds(8, 100_000, stage=0)
    assert wait_for(lambda: bool(one.called))
    assert "ranks of stage 0 by 0" in one.called
    assert not [other.called for other in leaking if other.called]


def test_what_an_earlier_job_left_is_no_part_of_it(
    tmp_path: Path, crowds: Callable[..., crowd.Crowd]
) -> None:
    folder = tmp_path / ".crowd"
    folder.mkdir()
    for rank in range(8):
        old = folder / f"0.-.{rank}.1.900.0"
        old.touch()
        os.utime(old, (1e9, 1e9))
    one = crowds(4, 900_000)
    assert wait_for(lambda: not list(folder.glob("0.*")))
    assert not one.called


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 recordings: stage 2 leaks, and so does rank 45."""
    out = tmp_path_factory.mktemp("made") / "run.tenure"
    options = ["--ranks", "64", "--steps", "150", "--only-make", "--out", str(out)]
    subprocess.run([sys.executable, ROOT / "bench/ranks.py", *options], check=True, timeout=180)
    return out


def test_a_leaking_stage_and_one_rank_are_both_on_the_first_screen(made: Path) -> None:
    verdict = recordings.judge([made])
    assert len(verdict["ranks"]) == 64
    screen = verdicts.first_screen(verdict)
    stage, alone = (line for line in screen.splitlines() if " made by " in line)
    assert "on ranks 16-23, all stage 2, host node002" in stage
    assert "on rank 45, stage 5, tp 5, host node005, GPU 5" in alone
    assert "seen on rank 16; the other 7 were only counted and grew as much" in screen
    assert "received (local of main)" in screen
    assert ".scores of Recall" in screen
    assert "on ranks 16-23, 45 of 64, on hosts node002 and node005; others flat" in screen
    assert "· 55 ranks only counted ·" in screen
    assert verdict["counted"][0]["ranks"] == list(range(17, 24))


def test_one_that_is_broken_is_named_and_hides_no_other(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.tenure"
    shutil.copytree(made, out)
    whole = recordings.judge([out])
    half, newer, none = (next(out.glob(f"*-{rank}-*.sqlite")) for rank in (3, 4, 5))
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    with sqlite3.connect(newer) as connection:
        connection.execute("UPDATE meta SET value='99' WHERE key='schema'")
    none.write_bytes(b"")
    verdict = recordings.judge([out])
    assert len(verdict["ranks"]) == 61
    assert verdict["suspects"] == whole["suspects"]
    why = {one["file"]: one["why"] for one in verdict["left_out"]}
    assert why.keys() == {half.name, newer.name, none.name}
    assert "damaged" in why[half.name]
    assert "newer Tenure" in why[newer.name]
    assert "is no recording" in why[none.name]
    ended = tenure_here("check", out)
    assert ended.returncode == 1
    assert f"left out: {half} is damaged" in ended.stdout


def test_recordings_of_several_jobs_are_not_mixed(made: Path, tmp_path: Path) -> None:
    first, other = sorted(made.glob("*.sqlite"))[:2]
    later = tmp_path / other.name
    shutil.copyfile(other, later)
    with sqlite3.connect(later) as connection:
        connection.execute("UPDATE meta SET value='another' WHERE key='run'")
        connection.execute("UPDATE meta SET value='2040-01-01T00:00:00+00:00' WHERE key='began'")
    with pytest.raises(InputError, match="are of 2 runs, .*: give those of one"):
        recordings.judge([first, later])
    shutil.copyfile(first, tmp_path / first.name)
    found = recordings.find([tmp_path])
    assert (found.files, found.earlier) == ([later], [tmp_path / first.name])


def test_no_recordings_and_no_steps_are_a_sentence(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no recordings: give a folder that `tenure run` made"):
        recordings.judge([tmp_path])
    one = next(made.glob("*-7-*.sqlite"))
    shutil.copyfile(one, tmp_path / one.name)
    with sqlite3.connect(tmp_path / one.name) as connection:
        connection.execute("DELETE FROM steps")
    said = verdicts.first_screen(recordings.judge([tmp_path]))
    assert said.startswith("TOO SHORT over 0 steps: at least 14 are needed")
    # Beside others it has no part in the verdict.
    shutil.copyfile(next(made.glob("*-8-*.sqlite")), tmp_path / "other-8-1-0.sqlite")
    assert [rank["rank"] for rank in recordings.judge([tmp_path])["ranks"]] == [8]


def test_read_by_python_it_is_judged_alike(made: Path) -> None:
    for rank in (1, 16, 45):
        path = next(made.glob(f"*-{rank}-*.sqlite"))
        case = (str(path), True, Evidence().given())
        assert recordings._judged([case]) == [recordings._judged_by_python(*case)]


def test_how_far_it_is_is_told(made: Path) -> None:
    seen: list[tuple[int, int]] = []
    recordings.judge([made], lambda done, total: seen.append((done, total)))
    assert seen[-1] == (64, 64)
