"""Which processes make one run, which of them speaks, and programs that watch themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tenure.inspect import recordings
from tenure.inspect.options import job_of
from tenure.inspect.runs import Head, by_run
from watched import forked_run, tenure_here, tenure_run

LOOP = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
def train(leak, steps=40):
    for step in range(steps):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if leak:
            kept.append(torch.randn(5000))
"""


def program(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(LOOP + textwrap.dedent(text))
    return name


def test_the_latest_run_in_a_folder_is_judged(tmp_path: Path) -> None:
    leaks = forked_run([program(tmp_path, "train(True)")], tmp_path)
    assert leaks.verdict["verdict"] == "leak"
    sound = forked_run([program(tmp_path, "train(False)")], tmp_path)
    assert sound.verdict["verdict"] == "flat", sound.err
    assert len(sound.verdict["ranks"]) == 1
    assert "FLAT" in sound.err
    checked = tenure_here("check", sound.folder)
    assert checked.returncode == 0, checked.stdout
    assert "1 recording of earlier runs left out" in checked.stderr
    first, second = sorted(sound.folder.glob("*.sqlite"), key=lambda path: path.stat().st_mtime)
    assert recordings.earlier_in([sound.folder]) == [first]
    assert recordings.run_of(first) == [first]
    assert recordings.run_of(second) == recordings.files_in([sound.folder]) == [second]


def test_runs_at_the_same_time_are_each_judged_alone(tmp_path: Path) -> None:
    """Each waits for the other after its first step, so that their times overlap."""
    meet = """
    import pathlib, sys, time
    train({leak}, 1)
    pathlib.Path(sys.argv[1]).touch()
    while not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.01)
    train({leak})
    """
    program(tmp_path, meet.format(leak=True), "leaks.py")
    program(tmp_path, meet.format(leak=False), "sound.py")
    command = [sys.executable, "-m", "tenure", "run"]
    started = [
        subprocess.Popen(
            [*command, "--json", f"{mine}.json", f"{mine}.py", mine, other],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for mine, other in (("leaks", "sound"), ("sound", "leaks"))
    ]
    said = [running.communicate(timeout=120)[1] for running in started]
    assert "LEAK" in said[0]
    assert "FLAT" in said[1]
    assert "LEAK" not in said[1]
    for name, verdict in (("leaks", "leak"), ("sound", "flat")):
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["verdict"] == verdict
        assert len(written["ranks"]) == 1
    assert len(recordings.files_in([tmp_path / "run.tenure"])) == 1


def recorded_runs(folder: Path, *told: dict[str, str]) -> list[list[str]]:
    """The ranks by run, of recordings that begin one after another and end together."""
    heads = []
    for number, meta in enumerate(told):
        path = folder / f"host-{meta['rank']}-{number}-0.sqlite"
        heads.append(Head(path, meta, float(number), 100.0))
    return [[head.meta["rank"] for head in run] for run in by_run(heads)]


def test_which_recordings_are_of_one_run(tmp_path: Path) -> None:
    def by_torchrun(rank: int, job: str = "a") -> dict[str, str]:
        return {"run": f"{job}{rank}", "rank": str(rank), "job": job}

    apart = {"run": "b", "rank": "0", "job": ""}
    assert recorded_runs(tmp_path, by_torchrun(0), apart, by_torchrun(1)) == [["0"], ["0", "1"]]
    two_jobs = [by_torchrun(rank, job) for rank in (0, 1) for job in "ab"]
    assert recorded_runs(tmp_path, *two_jobs) == [["0", "1"], ["0", "1"]]
    child = {"run": "a0", "rank": "0", "job": ""}
    assert recorded_runs(tmp_path, by_torchrun(0), child) == [["0", "0"]]
    actor = {"run": "", "rank": "0", "job": ""}  # under `tenure env`
    assert recorded_runs(tmp_path, actor, actor) == [["0", "0"]]


def test_what_ranks_of_one_launcher_have_in_common() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
    assert job_of({}) == ""
    assert job_of({**torchrun, "RANK": "0"}) == job_of({**torchrun, "RANK": "1"}) != ""
    assert job_of(torchrun) != job_of({**torchrun, "MASTER_PORT": "29501"})
    assert job_of(torchrun) == job_of({**torchrun, "SLURM_STEP_ID": "1"})
    steps = [job_of({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step}) for step in "12"]
    assert steps[0] != steps[1]


def test_a_leak_in_a_spawned_child_is_the_verdict(tmp_path: Path) -> None:
    program(tmp_path, "train(True)", "child.py")
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, torch\n"
        "subprocess.run([sys.executable, 'child.py'], check=True)\n"
        "torch.zeros(10)\n"
    )
    run = tenure_run([script.name], tmp_path)
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "leak", run.err
    assert len(run.verdict["ranks"]) == 1  # the parent trains nothing
    assert "FLAT" not in run.err
    assert "TOO SHORT" not in run.err


def test_processes_of_one_run_one_after_another(tmp_path: Path) -> None:
    program(tmp_path, "train(True)", "first.py")
    program(tmp_path, "train(False)", "second.py")
    script = tmp_path / "all.sh"
    script.write_text(f"set -e\n{sys.executable} first.py\n{sys.executable} second.py\n")
    run = tenure_run(["sh", script.name], tmp_path)
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "leak", run.err
    assert sorted(rank["verdict"] for rank in run.verdict["ranks"]) == ["flat", "leak"]


def test_a_program_that_watches_itself_takes_over(tmp_path: Path) -> None:
    run = forked_run(
        [
            program(
                tmp_path,
                """
                import tenure
                train(False)
                with tenure.watch() as session:
                    train(True)
                    print(session.verdict()["verdict"])
                """,
            )
        ],
        tmp_path,
    )
    assert run.code == 0, run.err
    assert run.out == "leak\n"
    assert "Traceback" not in run.err
    assert run.verdict["verdict"] == "leak", run.err
    assert len(list(run.folder.glob("*.sqlite"))) == 3  # before, meanwhile and after


def test_assert_flat_in_a_watched_program(tmp_path: Path) -> None:
    run = forked_run(
        [
            program(
                tmp_path,
                """
                import tenure
                tenure.assert_flat(lambda: train(False, 1))
                tenure.assert_flat(lambda: train(False, 1))
                try:
                    tenure.assert_flat(lambda: train(True, 1))
                except tenure.MemoryGrows as error:
                    print(str(error)[:4])
                train(True)
                """,
            )
        ],
        tmp_path,
    )
    assert run.code == 0, run.err
    assert run.out == "LEAK\n"
    assert run.verdict["verdict"] == "leak", run.err  # it is watched again afterwards
    assert "kept" in str(run.first["holders"])
    assert len(run.verdict["ranks"]) == 1


RANK = """
import torch.distributed as dist
import time
dist.init_process_group("gloo")
train(dist.get_rank() == 1, 150)
time.sleep(5)
dist.destroy_process_group()
"""


def test_the_rank_that_leaks_speaks_while_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenure", "run", "--", sys.executable, "-m"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = program(tmp_path, RANK)
    with subprocess.Popen(
        [*command, *launcher, script],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as running:
        assert running.stderr is not None
        told = [line for line in running.stderr if "LEAK" in line]
        assert running.wait(120) == 0
    assert len(told) == 2, told  # live, by rank 1, and at the end, by rank 0
    assert not list((tmp_path / "run.tenure").glob(".told*"))
