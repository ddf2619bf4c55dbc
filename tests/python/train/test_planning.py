"""From flags to a plan: what was left out, and what contradicts itself."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tenure import _C, InputError
from tenure.cli import app
from tenure.training import start
from tenure.training.changes import changes
from tenure.training.flags import Flags
from tenure.training.plan import Plan
from tenure.training.planning import World, plan_of, started_world

ROOT = Path(__file__).resolve().parents[3]


def parsed(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Flags:
    """What the command line makes of them, without running anything."""
    seen: list[Flags] = []
    monkeypatch.setattr(start, "train", seen.append)
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 0, done.stderr
    (flags,) = seen
    return flags


def test_without_flags_it_is_one_small_rank() -> None:
    plan = plan_of(Flags(), None)
    assert (plan.model, plan.size, plan.ranks, plan.pp, plan.dp) == ("gpt2", "tiny", 1, 1, 1)
    assert (plan.rows, plan.length, plan.microbatches) == (8, 128, 4)
    assert plan.learning_rate == 3e-3
    assert plan_of(Flags(size="124M"), None).learning_rate == 6e-4
    assert Path(plan.data, "argparse.py").is_file()
    assert plan.out == str(Path("train.tenure").absolute())


def test_a_plan_survives_the_way_to_a_rank() -> None:
    plan = plan_of(Flags(prompt="für \n'", offload="8GiB", seed=2**62), None)
    assert Plan.parse(plan.text()) == plan
    assert (plan.offload, plan.offload_budget) == ("budget", 8 << 30)
    plan = plan_of(Flags(fit="6GiB"), None)
    assert Plan.parse(plan.text()) == plan
    assert plan.fit == 6 << 30


@pytest.mark.parametrize(
    ("given", "ranks", "pp", "dp"),
    [
        (Flags(pp=2), 2, 2, 1),
        (Flags(ranks=4), 4, 1, 4),
        (Flags(ranks=4, pp=2), 4, 2, 2),
        (Flags(pp=2, dp=3), 6, 2, 3),
        (Flags(ranks=6, pp=2, dp=3), 6, 2, 3),
    ],
)
def test_ranks_are_split(given: Flags, ranks: int, pp: int, dp: int) -> None:
    plan = plan_of(given, None)
    assert (plan.ranks, plan.pp, plan.dp) == (ranks, pp, dp)


def test_ranks_of_a_launcher_are_all_used() -> None:
    plan = plan_of(Flags(pp=2), World(1, 4, 1, 4))
    assert (plan.ranks, plan.pp, plan.dp) == (4, 2, 2)


@pytest.mark.parametrize(
    ("given", "rows", "microbatches"),
    [
        (Flags(rows=32), 32, 4),
        (Flags(batch_size=2), 8, 4),
        (Flags(batch_size=2, microbatches=3), 6, 3),
        (Flags(total_batch_size=4096), 32, 4),
        (Flags(total_batch_size=4096, batch_size=4), 32, 8),
        (Flags(rows=12, batch_size=4), 12, 3),
        (Flags(total_batch_size=4096, dp=2), 16, 4),
    ],
)
def test_ways_to_say_how_much_a_step(given: Flags, rows: int, microbatches: int) -> None:
    plan = plan_of(given, None)
    assert (plan.rows, plan.microbatches) == (rows, microbatches)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Flags(ranks=3, pp=2), r"--ranks 3 cannot be split into pipelines of --pp 2 ranks"),
        (Flags(ranks=4, pp=2, dp=1), r"--ranks 4 is not --pp 2 times --dp 1, which is 2"),
        (Flags(total_batch_size=1000), r"--total-batch-size 1000 is no multiple of 128"),
        (Flags(total_batch_size=4096, rows=3), r"makes 32 rows a step and --rows says 3"),
        (Flags(rows=10, batch_size=4), r"10 rows a step cannot be split into microbatches of"),
        (Flags(rows=8, batch_size=4, microbatches=3), r"8 rows a step cannot be split into 3"),
        (Flags(zero=2), r"--zero is 0 .* or 3 .*, not 2"),
        (Flags(offload="much"), r"--offload is none, all or .* as 8GiB, not 'much'"),
        (Flags(device="qpu"), r"--device is auto, cpu or cuda, not 'qpu'"),
        (Flags(device="cuda", dp=64), r"--device cuda needs a GPU for each rank, of which 64"),
        (Flags(dtype="int8"), r"--dtype is float32 or bfloat16, not 'int8'"),
        (Flags(level="all"), r"--level is count, trace, deep, not 'all'"),
        (Flags(weights="/nowhere"), r"/nowhere does not exist"),
    ],
)
def test_what_cannot_be(given: Flags, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        plan_of(given, None)
    assert "\n" not in str(raised.value)


def test_ranks_that_a_launcher_did_not_start() -> None:
    with pytest.raises(InputError, match="--ranks says 3 and the launcher has started 2"):
        plan_of(Flags(ranks=3), World(0, 2, 0, 2))
    with pytest.raises(InputError, match="2 ranks cannot be split into pipelines of --pp 3"):
        plan_of(Flags(pp=3), World(0, 2, 0, 2))


def test_weights_without_a_config_beside_them(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="no config.json beside the weights"):
        plan_of(Flags(weights=str(tmp_path / "model.safetensors")), None)
    _C.TrainConfig.named("gpt2", "tiny").write(str(tmp_path / "config.json"))
    plan = plan_of(Flags(weights=str(tmp_path)), None)
    assert plan.size == str(tmp_path / "config.json")


def test_what_a_launcher_says() -> None:
    assert started_world({}) is None
    assert started_world({"RANK": "1", "WORLD_SIZE": "2"}) == World(1, 2, 1, 2)
    several = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert started_world(several) == World(5, 8, 1, 4)
    with pytest.raises(InputError, match="are no numbers"):
        started_world({"RANK": "one", "WORLD_SIZE": "2"})


def test_the_names_of_llm_c(monkeypatch: pytest.MonkeyPatch) -> None:
    line = """--input_bin a.bin --input_val_bin b.bin --output_dir out --batch_size 4
        --sequence_length 64 --total_batch_size 1024 --num_iterations 7 --learning_rate 0.5
        --warmup_iters 3 --learning_rate_decay_frac 0.2 --weight_decay 0.3 --grad_clip 2
        --val_loss_every 5 --val_max_steps 6 --sample_every 8 --dtype bfloat16 --zero_stage 3"""
    assert parsed(*line.split(), monkeypatch=monkeypatch) == replace(
        Flags(),
        data="a.bin",
        validation="b.bin",
        out="out",
        batch_size=4,
        length=64,
        total_batch_size=1024,
        steps=7,
        learning_rate=0.5,
        warm_up=3,
        learning_rate_decay_frac=0.2,
        weight_decay=0.3,
        clip=2.0,
        evaluate_every=5,
        evaluate_batches=6,
        sample_every=8,
        dtype="bfloat16",
        zero=3,
    )


def test_the_names_of_infinitrain(monkeypatch: pytest.MonkeyPatch) -> None:
    line = """--num_iteration 7 --pipeline_parallel 2 --virtual_pipeline_parallel 2
        --freq_generate_txt 9 --text_length 11 --nthread_per_process 4 --device cpu
        --save_interval 12 --max_checkpoint_keep 3"""
    assert parsed(*line.split(), monkeypatch=monkeypatch) == replace(
        Flags(),
        steps=7,
        pp=2,
        vpp=2,
        sample_every=9,
        sample_tokens=11,
        ranks=4,
        device="cpu",
        save_every=12,
        keep=3,
    )


def test_help_has_headings_and_examples() -> None:
    done = CliRunner().invoke(app, ["train", "--help"])
    assert done.exit_code == 0
    for heading in ("Model and data:", "Learning:", "Parallelism:", "Memory:"):
        assert f"\n{heading}\n" in done.stdout
    assert done.stdout.count("    tenure train") == 3


def test_commands_of_the_tutorial_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    commands = re.findall(r"^\$ (?:torchrun .* -m )?tenure train\b(.*)$", text, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        parsed(*shlex.split(command, comments=True), monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (Flags(steps=10**20), "--steps 1.* is more than can be counted to"),
        (Flags(keep=2**31), "--keep"),
        (Flags(timeout=float("inf")), "--timeout is a number of seconds up to a day"),
        (Flags(timeout=0), "--timeout"),
    ],
)
def test_figures_beyond_reason_are_refused(flags: Flags, words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan_of(flags, None)


def test_weights_say_what_they_are_of(tmp_path: Path) -> None:
    _C.TrainConfig.named("llama", "tiny").write(str(tmp_path / "config.json"))
    assert plan_of(Flags(weights=str(tmp_path)), None).model == "llama"
    with pytest.raises(InputError, match="are of a llama and --model says gpt2"):
        plan_of(Flags(weights=str(tmp_path), model="gpt2"), None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (Flags(pp=2, schedule="zb-h1", zero=3, save_every=7, prompt="x", microbatches=2), ""),
        (Flags(dp=2, rows=4), ""),  # as many rows on all ranks
        (Flags(dp=2), "rows a step 16 (was 8)"),
        (Flags(steps=900), "--steps 900 (was 300)"),
        (Flags(warm_up=5), "--warm-up 5 (was a tenth)"),
        (Flags(learning_rate=0.1), "--learning-rate 0.1 (was 0.003)"),
        (Flags(seed=3, length=64), "--seed 3 (was 0), --length 64 (was 128)"),
        (Flags(dtype="bfloat16"), "--dtype bfloat16 (was float32)"),
    ],
)
def test_what_a_run_that_goes_on_learns_otherwise(flags: Flags, said: str) -> None:
    told = changes(plan_of(Flags(), None), plan_of(flags, None))
    assert told.removeprefix("the run goes on with other settings than it had: ") == said
