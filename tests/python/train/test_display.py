"""What a run shows and writes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tenure import InputError
from tenure.training import ending, failures
from tenure.training.display import Display, introduction, memory_lines, memory_text, sample_text
from tenure.training.failures import Ended, Failure, first_cause
from tenure.training.flags import Flags
from tenure.training.folder import Folder
from tenure.training.metrics import Log, Metrics
from tenure.training.planning import plan_of


def rank(number: int = 0, **figures: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "stages": f"layer {number}",
        "in_flight": 2,
        "in_flight_bound": 2,
        "activations": 1 << 20,
        "activations_bound": 2 << 20,
        "allocated": 1,
        "peak": 3 << 20,
        "rss": 100 << 20,
        "fitted": None,
        **figures,
    }


def report(step: int, *ranks: dict[str, Any], steps: int = 100, loss: float = 2.0) -> Any:
    return {
        "step": step,
        "steps": steps,
        "loss": loss,
        "norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 2048,
        "seconds": 0.5,
        "ranks": list(ranks) or [rank()],
    }


def shown(steps: int = 100, *, terminal: bool = False) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140, highlight=False)
    return Display(plan_of(Flags(steps=steps), None), console), out


def test_elsewhere_than_in_a_terminal_there_are_about_ten_lines() -> None:
    display, out = shown()
    display.begin(859_904, 0)
    for step in range(1, 101):
        display.stepped(report(step))
    display.end()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert len(lines) == 11
    assert lines[-1] == (
        "step 100/100  loss 2.000  4,096 tokens/s  activations 1.0 MiB of 2.0 MiB (rank 0)"
    )


def test_in_a_terminal_there_is_a_bar() -> None:
    display, out = shown(terminal=True)
    display.begin(859_904, 40)
    display.stepped(report(41, rank(), rank(1, activations=1 << 10)))
    display.end()
    bar, first, second = out.getvalue().rpartition("step")[2].splitlines()[:3]
    assert "41/100" in bar
    assert "loss 2.000" in bar
    assert "rank 0  in flight 2 of 2  activations 1.0 MiB of 2.0 MiB" in first
    assert "rank 1  in flight 2 of 2  activations 1.0 KiB of 2.0 MiB" in second


def test_of_many_ranks_those_nearest_to_their_bounds_have_a_line() -> None:
    ranks = [rank(number, activations=number << 10) for number in range(20)]
    *lines, rest = memory_lines([*ranks, rank(20, activations=None)])
    assert [int(line.split()[1]) for line in lines] == list(range(12, 20))
    assert rest == "  and 13 more, further from their bounds"


def test_the_rank_nearest_to_its_bound_is_shown() -> None:
    near = rank(1, activations=19, activations_bound=20)
    assert memory_text([rank(), near]) == "activations 19 B of 20 B (rank 1)"
    unknown = rank(1, activations_bound=None, rss=200 << 20)
    assert memory_text([unknown]) == "in flight 2 of 2, RSS 200.0 MiB (rank 1)"
    assert memory_text([rank(), unknown]) == "activations 1.0 MiB of 2.0 MiB (rank 0)"


def test_samples_are_text_where_tokens_are_bytes() -> None:
    assert sample_text(b"def ", [*b"f\xc3\xa9", 0xFF, 300], True) == "def fé��"
    assert sample_text([1], [50256, 7], False).startswith("50256 7\n(numbers of tokens")


def test_a_sample_cannot_command_the_terminal() -> None:
    display, out = shown()
    display.sampled(3, list(b"a"), list(b"\x1b[31m\x07\n\tb"))
    assert out.getvalue() == "step 3: a sample\n  | a�[31m�\n  |     b\n"


def test_the_introduction_says_how_it_is_split() -> None:
    told = introduction(plan_of(Flags(pp=2, dp=2, zero=3, data="x.txt"), None), 1000, 50)
    assert "1,000 parameters, learns x.txt on 4 ranks" in told
    assert "(pipeline of 2, 2 data ranks, sharded)" in told
    assert "16 × 128 tokens in 4 microbatches, schedule 1f1b, from step 50 on" in told
    told = introduction(plan_of(Flags(fit="6GiB"), None), 1000, 0)
    assert told.endswith("8 × 128 tokens in 4 microbatches, each made to fit into 6.0 GiB")


def test_the_table_has_the_most_of_each_figure() -> None:
    history = ending.History()
    history.stepped(report(1, rank(activations=None, activations_bound=None, rss=9), loss=5.0))
    history.stepped(report(2, rank(in_flight=3, rss=7)))
    history.stepped(report(3, rank(activations=5, in_flight=1, rss=8), loss=1.5))
    (most,) = history.ranks
    assert (most["in_flight"], most["activations"], most["rss"]) == (3, 1 << 20, 9)
    assert history.text() == "loss 5.000 -> 1.500, 3 steps, 4,096 tokens/s"
    out = io.StringIO()
    verdict = {"ranks": [{"rank": 0, "verdict": "leak"}]}
    Console(file=out, width=140).print(ending.memory_table([most], verdict))
    assert re.search(r"0 .* 3 / 2 .* 1.0 MiB / 2.0 MiB .* 3.0 MiB .* 9 B .* LEAK", out.getvalue())


def test_the_table_has_what_steps_with_a_plan_held() -> None:
    history = ending.History()
    for step, fitted in enumerate((None, 5 << 20, 4 << 20)):
        history.stepped(report(step, rank(fitted=fitted, peak=9 << 20)))
    out = io.StringIO()
    Console(file=out, width=140).print(ending.memory_table(history.ranks, None, fit=6 << 20))
    assert "planned / --fit" in out.getvalue()
    assert re.search(r"5.0 MiB / 6.0 MiB .* 9.0 MiB", out.getvalue())


# --- files ---------------------------------------------------------------------------------------


def test_metrics_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in (1, 2, 3):
        metrics.write("step", step, loss=1.0 / step)
    metrics.close()
    with path.open("a") as file:
        file.write('{"event": "step", "st')  # killed in the middle of a line
    metrics = Metrics(path)
    metrics.go_on_from(2)
    metrics.write("step", 3, loss=9.0)
    metrics.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["step"], one["loss"]) for one in records] == [(1, 1.0), (2, 0.5), (3, 9.0)]


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write("step", 1, loss=float("nan"), norm=1.0)
    metrics.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["norm"], "loss" in record) == (1.0, False)


def test_log_lines_have_times(tmp_path: Path) -> None:
    Log(tmp_path / "train.log")("one\ntwo \x1b[31m")
    first, second = (tmp_path / "train.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  one", first)
    assert second.endswith("two �[31m")


def test_a_folder_with_a_run_is_not_written_to(tmp_path: Path) -> None:
    plan = plan_of(Flags(out=str(tmp_path / "run")), None)
    folder = Folder(plan.out)
    folder.check(plan, overwrite=False)
    folder.claim(plan, overwrite=False)
    folder.check(plan, overwrite=False)  # nothing has happened there yet
    folder.metrics.touch()
    folder.check(plan, overwrite=False)
    folder.metrics.write_text("{}")
    with pytest.raises(InputError, match="has a run in it: --resume goes on with it"):
        folder.check(plan, overwrite=False)
    folder.check(plan, overwrite=True)
    folder.claim(plan, overwrite=True)
    assert not folder.metrics.exists()


def test_what_others_made_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of another program")
    plan = plan_of(Flags(out=str(tmp_path)), None)
    with pytest.raises(InputError, match="no run of ours made"):
        Folder(tmp_path).check(plan, overwrite=True)
    with pytest.raises(InputError, match="is a file"):
        Folder(tmp_path / "metrics.jsonl").check(plan, overwrite=False)


# --- who began it --------------------------------------------------------------------------------


def said(text: str, kind: str, at: float = 0.0) -> Failure:
    return Failure(text, kind, "", at)


def test_a_rank_that_was_killed_is_the_cause_and_not_those_that_waited_for_it() -> None:
    ended = {0: Ended(10, 1, 5.0), 1: Ended(11, -9, 5.2), 2: Ended(12, -15, 6.0)}
    told = {0: said("rank 1 does not answer", "other")}
    assert first_cause(ended, told) == (1, "rank 1 (pid 11) was killed by signal 9 (SIGKILL)")


def test_a_rank_that_had_to_be_killed_is_no_cause() -> None:
    ended = {0: Ended(10, 1, 5.0), 1: Ended(11, -9, 35.0)}
    told = {0: said("RuntimeError: no memory", "own")}
    assert first_cause(ended, told) == (0, "rank 0 failed: RuntimeError: no memory")


def test_a_rank_that_was_stopped_is_the_cause_of_what_the_others_say() -> None:
    ended = {0: Ended(10, 1, 5.0), 1: Ended(11, -15, 5.3)}
    told = {0: said("rank 1 does not answer", "other")}
    assert first_cause(ended, told, {11})[0] == 1
    told[1] = said("rank 0 has ended", "other")  # it went on for as long as it was let
    found = first_cause({**ended, 1: Ended(11, 1, 5.3)}, told, {11})
    assert found[1].startswith("rank 1 (pid 11) was stopped, as by SIGSTOP")
    told = {0: said("RuntimeError: no memory", "own")}
    assert first_cause(ended, told, {11}) == (0, "rank 0 failed: RuntimeError: no memory")


def test_the_first_of_several_that_failed_on_their_own() -> None:
    ended = {0: Ended(10, 1, 5.0), 1: Ended(11, 1, 5.0)}
    told = {0: said("late", "own", 2.0), 1: said("early", "own", 1.0)}
    assert first_cause(ended, told) == (1, "rank 1 failed: early")
    told = {0: said("rank 1 ended", "other", 1.0), 1: said("a bad flag", "input", 2.0)}
    assert first_cause(ended, told) == (1, "a bad flag")
    told = {0: said("rank 1 did not answer", "other")}
    assert first_cause({0: Ended(10, 1, 5.0)}, told) == (0, "rank 1 did not answer")


def test_a_rank_that_said_nothing() -> None:
    found = (3, "rank 3 (pid 13) ended with exit code 7 and said nothing")
    assert first_cause({3: Ended(13, 7, 1.0)}, {}) == found
    told = {0: said("rank 3 did not answer", "other")}
    assert first_cause({0: Ended(10, 1, 1.0), 3: Ended(13, 7, 1.1)}, told) == found
    ended = {0: Ended(10, 7, 1.0), 1: Ended(11, -9, 1.1)}
    assert first_cause(ended, {}) == (1, "rank 1 (pid 11) was killed by signal 9 (SIGKILL)")


def test_what_ranks_leave_is_read_again(tmp_path: Path) -> None:
    failure = Failure.of(InputError("too\nmuch"))
    failures.leave(tmp_path, 2, failure)
    (tmp_path / "rank-3.json").write_text('{"te')
    assert failures.read(tmp_path) == {2: failure}
    failures.forget(tmp_path, 2)
    failures.forget(tmp_path, 2)
    assert failures.read(tmp_path) == {}
    assert (failure.text, failure.kind) == ("too", "input")
    assert Failure.of(OSError("no space")).text == "OSError: no space"
