"""`tenure train` and what it cannot do: one sentence, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from forks import run_forked
from tenure.cli import app

DEADLOCK = "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n1F1,1B1,1F0,1B0,1F2,1B2,1F3,1B3\n"
SMALL = ["--rows", "4", "--length", "32", "--microbatches", "2", "--no-observe"]
SMALL += ["--sample-tokens", "8"]


def refused(out: Path, *arguments: str) -> str:
    """The sentence with which it refuses; whatever is in `out` stays as it is."""
    before = contents(out)
    done = CliRunner().invoke(app, ["train", "--out", str(out), *arguments])
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("tenure: ")
    assert done.stderr.count("\n") == 1
    assert contents(out) == before
    return done.stderr


def contents(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def text_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_each_machine_says_what_is_missing_there(
    tmp_path: Path, local_rank: int
) -> None:
    ranks = {"RANK": 4 + local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank}
    done = CliRunner().invoke(
        app,
        ["train", "--out", str(tmp_path), "--dp", "8", "--data", "no-such-file.txt"],
        env={name: str(value) for name, value in ranks.items()} | {"LOCAL_WORLD_SIZE": "4"},
    )
    assert done.exit_code == 2
    assert ("no-such-file.txt" in done.stderr) is (local_rank == 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pp", "5"], "5 stages"),
        (["--pp", "2", "--vpp", "3", "--schedule", "interleaved-1f1b"], "6 stages"),
        (["--rows", "10", "--microbatches", "4"], "10 rows cannot be split into 4 microbatches"),
        (["--data", "no-such-file.txt"], "no-such-file.txt"),
        (["--validation", "no-such-file.bin"], "no-such-file.bin"),
        (["--schedule", "no-such-file.csv"], "no-such-file.csv"),
        (["--schedule", "2f2b", "--pp", "2"], "2f2b"),
        (["--ranks", "3", "--pp", "2"], "--ranks 3 cannot be split into pipelines of --pp 2"),
        (["--ranks", "2", "--dp", "1"], "--ranks 2 is not --pp 1 times --dp 1"),
        (["--offload", "1MB"], "cannot be met"),
        (["--offload", "lots"], "--offload is none, all or"),
        (["--fit", "1MB"], "a budget of 976.6 KiB cannot be met: the weights, gradients and"),
        (
            ["--fit", "lots"],
            "--fit is the memory that a rank's device may use, as 6GiB, not 'lots'",
        ),
        (["--fit", "0"], "as 6GiB, not '0'"),
        (["--fit", "-1GiB"], "as 6GiB, not '-1GiB'"),
        (["--fit", "6GiB", "--offload", "all"], "--offload says it for all: leave one of them out"),
        (["--fit", "6GiB", "--recompute"], "--recompute says it for all: leave one of them out"),
        (["--zero", "1"], "--zero is 0"),
        (["--length", "1000"], "longer than the model's context"),
        (["--model", "bert"], 'there is no model "bert"'),
        (["--size", "7B"], "its sizes are tiny, 124M"),
        (["--weights", "no-such-folder"], "no-such-folder does not exist"),
        (["--prompt", ""], "prompt"),
        (["--prompt", "\udcc3("], r"--prompt '\udcc3(' is no text in UTF-8"),
        (["--data", "\udcc3.txt"], r"--data '\udcc3.txt' is no text in UTF-8"),
        (["--beta2", "1.5"], "beta2"),
        (["--resume", "--overwrite"], "choose one"),
        (["--learning-rate", "inf"], "--learning-rate is a finite number, not inf"),
        (["--beta1", "nan"], "--beta1 is a finite number, not nan"),
    ],
)
def test_what_cannot_run(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path / "run", *arguments)


@pytest.mark.parametrize(
    ("name", "content", "flag", "said"),
    [
        ("short.txt", "abc", "--data", "short.txt"),
        ("empty.txt", "", "--data", "empty.txt"),
        ("words.bin", "abc", "--data", "no token file of llm.c"),
        ("deadlock.csv", DEADLOCK, "--schedule", "deadlock.csv: the schedule is a deadlock"),
        ("garbage.csv", "hello,world\n", "--schedule", "garbage.csv"),
    ],
)
def test_files_that_cannot_be_used(
    name: str, content: str, flag: str, said: str, tmp_path: Path
) -> None:
    path = text_file(tmp_path / name, content)
    assert said in refused(tmp_path / "run", flag, path, "--pp", "2")


def test_a_schedule_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    said = refused(tmp_path / "run", "--schedule", "nope.csv", "--pp", "2")
    assert said.count("nope.csv") == 1
    assert said.endswith("nope.csv cannot be read: No such file or directory\n")


def test_an_empty_name_is_no_folder() -> None:
    done = CliRunner().invoke(app, ["train", "--out", ""])
    assert done.exit_code == 2
    assert done.stderr == (
        "tenure: --out is a folder and its name is empty: leave it out, or name one\n"
    )


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = text_file(tmp_path / "file", "")
    assert "is a file: --out is a folder" in refused(Path(file))
    assert "cannot write to" in refused(Path(file) / "run", "--steps", "1")


def test_a_process_says_it_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenure", "train", "--pp", "5", "--out", "run"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_no_text_are_told_in_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenure", "train", "--prompt", b"\xc3(", "--out", "run"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == r"tenure: --prompt '\udcc3(' is no text in UTF-8: choose another" + "\n"


def test_the_tutorial_lists_the_names_that_others_have_for_flags() -> None:
    tutorial = (Path(__file__).parents[3] / "docs" / "tutorial.md").read_text()
    _, _, rest = tutorial.partition("| ours | theirs |")
    table = rest.partition("\n\n")[0]
    flags = [option.opts for option in get_command(app).commands["train"].params]
    others = [name.replace("-", "_") for names in flags for name in names[1:]]
    assert others
    assert [name for name in others if f"`{name.replace('__', '--')}`" not in table] == []
    known = {name for names in flags for name in names}
    listed = re.findall(r"`(--[a-z_-]+)`", table)
    assert [name for name in listed if name.replace("_", "-") not in known] == []


# --- folders with a run in them ------------------------------------------------------------------


def odd_path(kind: str, folder: Path) -> Path:
    path = folder / "odd"
    if kind == "too long":
        return folder / ("a" * 5000)
    if kind == "in a circle":
        path.symlink_to(path)
    if kind == "a pipe":
        os.mkfifo(path)
    if kind == "under a file":
        path.write_text("no folder")
        return path / "sub"
    if kind == "a folder of circles":
        path.mkdir()
        (path / "a.py").symlink_to(path / "a.py")
    return path


@pytest.mark.parametrize("kind", ["too long", "in a circle", "a pipe", "under a file"])
@pytest.mark.parametrize("flag", ["--data", "--validation", "--weights"])
def test_a_path_to_nothing_that_can_be_read(flag: str, kind: str, tmp_path: Path) -> None:
    path = odd_path(kind, tmp_path)
    assert path.name in refused(tmp_path / "run", flag, str(path), "--size", "tiny", *SMALL)


def test_a_folder_whose_sources_lead_nowhere(tmp_path: Path) -> None:
    path = odd_path("a folder of circles", tmp_path)
    assert "no Python sources" in refused(tmp_path / "run", "--data", str(path), *SMALL)


@pytest.mark.parametrize("kind", ["too long", "in a circle", "a pipe", "under a file"])
def test_a_path_that_no_run_can_be_written_to(kind: str, tmp_path: Path) -> None:
    path = odd_path(kind, tmp_path)
    done = CliRunner().invoke(app, ["train", "--out", str(path), *SMALL])
    assert done.exit_code == 2, done.output
    assert "--out" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on one rank, in a process: it has the clock and the groups to itself."""
    out = tmp_path_factory.mktemp("finished") / "run"
    command = ["-m", "tenure", "train", "--steps", "3", "--out", str(out), *SMALL]
    done = run_forked(command, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    flags = ["--learning-rate", "1e20", "--clip", "0", "--warm-up", "0", "--steps", "9", *SMALL]
    command = ["-m", "tenure", "train", "--out", str(tmp_path / "run"), *flags]
    done = run_forked(command, timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(
        r"tenure: the loss of step \d is (nan|inf): try a lower --learning-rate, or --clip\n",
        done.stderr,
    )
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    """The loss of a step is found before the step spoils them."""
    out = tmp_path / "run"
    flags = ["--learning-rate", "1e30", "--warm-up", "0", "--steps", "1", *SMALL]
    command = ["-m", "tenure", "train", "--out", str(out), *flags]
    done = run_forked(command, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("tenure: the validation loss of step 1 is nan: try a lower")
    assert not list((out / "checkpoints").iterdir())


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_log_that_cannot_be_written_is_an_error_in_a_line(ranks: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "train.log").symlink_to("/dev/full")
    command = ["-m", "tenure", "train", "--out", str(out), "--ranks", ranks, "--steps", "1", *SMALL]
    done = run_forked(command, timeout=120)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert all(line.startswith("tenure: ") for line in done.stderr.splitlines()), done.stderr


def test_one_rank_trains_in_the_process_itself(finished: Path) -> None:
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records if one["event"] == "step"] == [1, 2, 3]
    assert [path.name for path in (finished / "checkpoints").iterdir()] == ["step-000003"]
    assert not (finished / "logs").exists()


def test_a_run_is_not_overwritten_by_accident(finished: Path) -> None:
    said = refused(finished, "--steps", "3", *SMALL)
    assert "has a run in it, up to step 3: --resume goes on with it, --overwrite begins" in said


def test_a_run_that_is_done_has_nothing_to_resume(finished: Path) -> None:
    said = refused(finished, "--steps", "3", "--resume", *SMALL)
    assert "has done 3 steps" in said


def test_a_run_of_another_model_is_not_resumed(finished: Path) -> None:
    said = refused(finished, "--steps", "9", "--resume", "--model", "llama", *SMALL)
    assert "another model" in said


def test_what_is_other_than_before_is_said(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", finished, out], check=True)
    flags = ["--seed", "7", "--dp", "1", "--save-every", "1", "--resume", *SMALL]
    command = ["-m", "tenure", "train", "--steps", "4", "--out", str(out), *flags]
    done = run_forked(command, timeout=120)
    assert done.returncode == 0
    told = "the run goes on with other settings than it had: --seed 7 (was 0), --steps 4 (was 3)"
    assert done.stderr == f"tenure: {told}\n"
    assert told in (out / "train.log").read_text()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["checkpoint.json", "config.json", "model-*", "optimizer-*"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_checkpoint_is_not_resumed(
    name: str, damage: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    subprocess.run(["cp", "-r", finished, tmp_path / "run"], check=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    damage(min(checkpoint.glob(name)))
    said = refused(tmp_path / "run", "--steps", "9", "--resume", *SMALL)
    assert "step-000003" in said
