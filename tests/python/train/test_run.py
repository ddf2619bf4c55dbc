"""Whole runs of `tenure train`, on real ranks: to the end, killed, stopped, resumed, joined."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forks import Forked
from tenure import _C
from tenure.cli import app

STEPS = 60
SIZE = ["--rows", "8", "--length", "64", "--steps", str(STEPS)]
SAVING = ["--save-every", "10", "--keep", "0", "--evaluate-every", "30"]
ALONE = ["--ranks", "1"]
SPLIT = ["--ranks", "2", "--pp", "2", "--zero", "3"]
SHORT = ["--no-observe", "--sample-every", "0"]
TENURE = ["-m", "tenure"]  # the ranks that it starts import torch, as torchrun's do
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]  # any free port
JOINED = [*TORCHRUN, "--nproc-per-node", "2", "-m", "tenure"]


def start(
    out: Path, *arguments: str, program: list[str] = TENURE, stdout: Any = subprocess.PIPE
) -> subprocess.Popen[str]:
    command = [*program, "train", "--out", str(out), *SIZE, *SAVING, *arguments]
    return Forked(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # other tests use the cores too
    )


def trained(out: Path, *arguments: str, program: list[str] = TENURE) -> str:
    """What a run printed that went well, and nothing on stderr."""
    process = start(out, *arguments, program=program)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr + stdout
    if program is TENURE:
        assert stderr == ""
    return stdout


def records(out: Path, event: str) -> dict[int, dict[str, Any]]:
    """By step; each step once."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["event"] == event]
    assert len({one["step"] for one in found}) == len(found)
    return {one["step"]: one for one in found}


def losses(out: Path) -> list[float]:
    return [one["loss"] for _, one in sorted(records(out, "step").items())]


def wait_for(text: str, file: Path, process: subprocess.Popen[str]) -> None:
    """Until it stands in the file, which the process makes."""
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        if file.exists() and text in file.read_text():
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"{text!r} did not come: {process.communicate()}")


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    wait_for(f'"step": {step},', out / "metrics.jsonl", process)


def pid_of(out: Path, rank: int) -> int:
    found = re.findall(rf"rank {rank}: pid (\d+)", (out / "train.log").read_text())
    return int(found[-1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on two ranks, to its end: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, trained(out, *SPLIT, "--sinks", "jsonl", "--alerts", "rss > 1 MiB")


def test_memory_is_monitored(whole: tuple[Path, str]) -> None:
    out, shown = whole
    (alert,) = (line for line in shown.splitlines() if line.startswith("alert: "))
    assert re.match(r"alert: host_rss_bytes is .* on rank [01], above 1 MiB", alert)
    assert len((out / "memory/memory.jsonl").read_text().splitlines()) == STEPS
    top = CliRunner().invoke(app, ["top", str(out), "--once"])
    assert top.exit_code == 0
    assert "2 ranks: 2 ended; step 60" in top.output


def test_the_model_learns(whole: tuple[Path, str]) -> None:
    out, _ = whole
    found = losses(out)
    assert len(found) == STEPS
    assert found[0] == pytest.approx(5.55, abs=0.2)  # the logarithm of 256
    assert sum(found[-10:]) / 10 < 3.7
    assert sorted(records(out, "evaluation")) == [30, 60]
    assert sorted(records(out, "checkpoint")) == [10, 20, 30, 40, 50, 60]


def test_what_is_shown(whole: tuple[Path, str]) -> None:
    out, shown = whole
    lines = shown.splitlines()
    assert "858,880 parameters, learns Python's standard library on 2 ranks of cpu" in lines[0]
    assert 10 <= sum(line.startswith("step ") and "loss" in line for line in lines) <= 14
    assert "step 60: a sample" in lines
    assert "  | def " in shown
    for number in (0, 1):
        row = next(line for line in lines if re.match(rf"\s+{number}  \S", line))
        assert re.search(r"\d / \d .* MiB / .* MiB .* MiB .* MiB .* flat$", row), row
    assert "FLAT over 60 steps" in shown
    assert "run/report.html" in shown
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert "Traceback" not in (out / "train.log").read_text()


def test_a_longer_run_stays_level(tmp_path: Path) -> None:
    """malloc's heap gets holes, which nobody holds: without giving them back it grows by 9 %."""
    out = tmp_path / "run"
    more = ["--steps", "150", "--length", "128", "--save-every", "0", "--evaluate-every", "0"]
    shown = trained(out, *SPLIT, *more, "--sample-every", "0")
    assert "FLAT over 150 steps" in shown
    of_ranks = zip(*(one["ranks"] for _, one in sorted(records(out, "step").items())), strict=True)
    for steps in of_ranks:
        rss = [one["rss"] for one in steps]
        assert max(rss[-30:]) < 1.05 * max(rss[10:40])


def test_every_step_says_what_each_rank_held(whole: tuple[Path, str]) -> None:
    out, _ = whole
    for step, record in records(out, "step").items():
        assert [one["rank"] for one in record["ranks"]] == [0, 1]
        assert all(one["in_flight"] <= one["in_flight_bound"] for one in record["ranks"])
        for one in record["ranks"]:
            if step > 1:
                assert 0 < one["activations"] <= one["activations_bound"]


def test_a_killed_rank_is_named_and_the_run_goes_on(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(out, *SPLIT)
    wait_for_step(out, 15, process)
    victim = pid_of(out, 1)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 1
    newest = _C.train_newest_checkpoint(str(out / "checkpoints"))
    assert newest is not None
    step = int(newest[-6:])
    assert step >= 10
    assert re.fullmatch(
        rf"tenure: rank 1 \(pid {victim}\) was killed by signal 9 \(SIGKILL\); the same command "
        rf"with --resume goes on from step {step}\n"
        r"tenure: rank 1 left no word: it was killed, or ended at once; its last sample "
        r"\(step 1\d, .*\): \d+\.\d MB resident, .* left on the host\n"
        r"tenure: see: tenure report \S*run\n",
        stderr,
    ), stderr
    assert not Path(f"/proc/{pid_of(out, 0)}").exists()
    shown = trained(out, *SPLIT, "--resume")
    assert f"from step {step} on" in shown
    assert losses(out) == losses(whole[0])
    evaluations = {step: one["loss"] for step, one in records(out, "evaluation").items()}
    assert evaluations == {s: one["loss"] for s, one in records(whole[0], "evaluation").items()}


def test_a_rank_that_runs_out_of_memory_says_what_held_it(tmp_path: Path) -> None:
    """What it asks for in its first step is large: nothing small is refused, which would end it."""
    out = tmp_path / "run"
    process = start(out, *SPLIT, "--no-observe", "--rows", "64", "--length", "256")
    wait_for("rank 1: pid", out / "train.log", process)
    victim = pid_of(out, 1)
    used = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{victim}/status").read_text())
    assert used is not None
    resource.prlimit(victim, resource.RLIMIT_DATA, ((int(used[1]) << 10) + (32 << 20),) * 2)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    first, ran_out, held, see = stderr.splitlines()
    assert "can't allocate memory" in first
    assert re.match(r"tenure: rank 1 ran out of memory: it asked .*ulimit -d", ran_out)
    assert re.match(r"tenure: \w+ '.*' held .* MB in \d+ leases?", held)
    assert see == "tenure: see: tenure report run"
    shown = CliRunner().invoke(app, ["report", str(out), "--out", str(tmp_path / "page.html")])
    assert shown.exit_code == 0
    assert shown.output.startswith(ran_out.removeprefix("tenure: "))


@pytest.mark.parametrize(
    ("ranks", "number"),
    [(SPLIT, signal.SIGINT), (SPLIT, signal.SIGTERM), (ALONE, signal.SIGTERM)],
)
def test_who_asks_it_to_stop_gets_a_checkpoint(
    ranks: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(out, *ranks, "--no-observe", "--steps", "5000")
    wait_for_step(out, 12, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    last = max(records(out, "step"))
    assert stderr == (
        f"tenure: stopped by {number.name}; the same command with --resume goes on from step "
        f"{last}\n"
    )
    assert (out / "checkpoints" / f"step-{last:06}" / "checkpoint.json").exists()
    assert not list((out / "checkpoints").glob("*.partial"))


def test_torchrun_is_joined_and_ranks_may_change(whole: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", whole[0], out], check=True)
    more = ["--steps", "64", "--resume", "--dp", "2", "--no-observe"]
    shown = trained(out, *more, program=JOINED)
    assert "2 ranks of cpu (2 data ranks)" in shown
    assert sorted(records(out, "step")) == list(range(1, 65))
    assert losses(out)[-1] < 3.7
    assert "not watched" in shown


def joined(out: Path, *flags: list[str]) -> list[tuple[int, str]]:
    """Ranks that each have flags of their own: how each ended, and what it said on stderr."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank, mine in enumerate(flags):
        place = {"RANK": rank, "WORLD_SIZE": len(flags), "LOCAL_RANK": rank, "MASTER_PORT": port}
        world = {name: str(value) for name, value in place.items()}
        ranks.append(
            Forked(
                [*TENURE, "train", "--out", out, *SIZE, *SHORT, "--evaluate-every", "0", *mine],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                cwd=out.parent,
                env=os.environ | world | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
            )
        )
    return [(rank.wait(timeout=60), rank.communicate()[1]) for rank in ranks]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            [["--pp", "2"], ["--pp", "1", "--strict"]],
            "rank 1 was given --pp 1, and rank 0 --pp 2: give all ranks the same flags",
        ),
        (
            [["--zero", "3"], ["--zero", "3"], ["--no-strict", "--seed", "1"], ["--clip", "2"]],
            "rank 2 was given --seed 1 --zero 0 --no-strict, and rank 0 --seed 0 --zero 3 --strict",
        ),
        ([["--pp", "2"], ["--pp", "3"]], "rank 1 was given --pp 3, and rank 0 --pp 2"),
        ([["--data", "a file"], []], "rank 1 was given no --data, and rank 0 --data 'a file'"),
        ([["--pp", "2", "--zero", "7"]] * 2, "--zero is 0"),
    ],
)
def test_ranks_that_are_told_otherwise_end_at_once(
    flags: list[list[str]], said: str, tmp_path: Path
) -> None:
    """Without waiting for the timeout, and before anything is written."""
    (code, told), *others = joined(tmp_path / "run", *flags)
    assert code == 2
    assert told.startswith(f"tenure: {said}")
    assert told.count("\n") == 1
    assert others == [(2, "")] * len(others)
    assert not (tmp_path / "run").exists()


def test_when_one_rank_cannot_begin_none_does(tmp_path: Path) -> None:
    """What rank 0 alone finds out, all hear of; and nothing is removed meanwhile."""
    same = ["--pp", "2", "--steps", "2"]
    assert joined(tmp_path / "run", same, same) == [(0, ""), (0, "")]
    (code, told), other = joined(tmp_path / "run", same, same)
    assert code == 2
    assert "has a run in it, up to step 2" in told
    assert other == (2, "")
    anew = [*same, "--overwrite"]
    (code, _), other = joined(tmp_path / "run", anew, [*anew, "--pp", "1"])
    assert (code, other[0]) == (2, 2)
    assert (tmp_path / "run" / "checkpoints" / "step-000002").exists()


def test_ranks_start_again_by_themselves(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, *SPLIT, "--no-observe", "--restarts", "1", "--steps", "40")
    wait_for_step(out, 12, process)
    os.kill(pid_of(out, 0), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
    assert re.search(r"from step \d0 on", stdout)
    assert sorted(records(out, "step")) == list(range(1, 41))


def test_a_rank_that_is_stopped_is_given_up_and_named(tmp_path: Path) -> None:
    """The launcher alone would wait 30 seconds more for a process that does not obey SIGTERM."""
    out = tmp_path / "run"
    process = start(out, *SPLIT, "--no-observe", "--steps", "5000", "--timeout", "3")
    wait_for_step(out, 12, process)
    victim = pid_of(out, 1)
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 1
    assert re.fullmatch(
        rf"tenure: rank 1 \(pid {victim}\) was stopped, as by SIGSTOP, and the others have given "
        r"it up; the same command with --resume goes on from step \d+\n",
        stderr,
    ), stderr
    assert not Path(f"/proc/{victim}").exists()


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, "--no-observe", "--steps", "5000")
    wait_for_step(out, 2, process)
    command = ["train", "--out", str(out), *SIZE, "--no-observe", "--steps", "6000"]
    for more in ([], ["--overwrite"], ["--resume"]):
        done = CliRunner().invoke(app, [*command, *more])
        assert (done.exit_code, done.stdout) == (2, "")
        assert re.fullmatch(
            rf"tenure: a run is still going in \S+/run \(pid {process.pid} on \S+\): wait for it "
            r"or stop it, or give --out another folder\n",
            done.stderr,
        ), done.stderr
    process.kill()  # it cannot let go of anything
    process.communicate()
    trained(out, "--overwrite", *SHORT, "--steps", "2")
    assert sorted(records(out, "step")) == [1, 2]
    assert not (out / "lock").exists()


@pytest.mark.parametrize("ranks", [ALONE, SPLIT])
def test_a_full_stdout_does_not_end_a_run(ranks: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Path("/dev/full").open("w") as full:
        process = start(out, *ranks, *SHORT, "--steps", "3", stdout=full)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert stderr == (
        "tenure: stdout cannot be written to (No space left on device): the run goes on, and what "
        "it would say is in run/train.log\n"
    )
    log = (out / "train.log").read_text()
    assert "stdout cannot be written to" in log
    assert "metrics   run/metrics.jsonl" in log.splitlines()[-1]
    assert not (out / "logs").exists()
