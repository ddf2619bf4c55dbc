"""`tenure demo`: it learns, its scopes end empty, and its last line tells the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tenure
from tenure.demo import Options, Training, corpus, flatness

TENURE = str(Path(sys.executable).with_name("tenure"))
MIB = 1 << 20


@pytest.fixture(scope="module")
def output() -> str:
    command = [TENURE, "demo", "--steps", "12", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_learns(output: str) -> None:
    found = re.search(r"^loss ([\d.]+) -> ([\d.]+) in 12 steps", output, re.MULTILINE)
    assert found is not None, output
    first, last = map(float, found.groups())
    assert 5 < first < 6.5  # ln 256 is 5.5: it began knowing nothing
    assert last < first - 1.5


def test_the_ledger_is_shown_by_kind_and_by_owner(output: str) -> None:
    rows = {line.split("  ")[0].strip(): line.split() for line in output.splitlines()}
    assert rows["parameter"][-4:] == rows["optimizer"][-4:]  # the average is as large as the model
    assert rows["activation"][1:4] == ["0", "B", "0"]  # none outlived its step
    assert rows["activation"][-2:] == ["2.2", "MiB"]
    assert "activation 'block 2'" in rows
    assert "user 'batch'" in rows


def test_progress_and_rss_are_shown(output: str) -> None:
    assert len(re.findall(r"^step \d+/12  loss [\d.]+ .* held .* RSS ", output, re.MULTILINE)) == 12
    assert "too few steps" in output.splitlines()[-1]


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_nothing_is_held_between_steps_but_weights() -> None:
    options = Options(steps=2, seed=0, device=torch.device("cpu"))
    before = tenure.ledger().bytes
    training = Training(options, corpus())
    weights = tenure.ledger().bytes
    assert weights - before == 2 * 4 * training.parameters
    for number in (1, 2):
        step = training.step(number)
        assert step.held > weights
        assert tenure.ledger().bytes == weights
    del training
    assert tenure.ledger().bytes == before


@pytest.mark.usefixtures("one_thread")
def test_a_lease_that_outlives_its_step_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(steps=1, seed=0, device=torch.device("cpu"))
    training = Training(options, corpus())
    kept: list[tenure.Lease] = []
    follow_weights = training._follow_weights

    def keep_one() -> None:
        kept.append(tenure.hold(torch.zeros(256), "forgotten"))
        follow_weights()

    monkeypatch.setattr(training, "_follow_weights", keep_one)
    with pytest.raises(tenure.ScopeError, match=r"'step 1' closed with 1 lease .*'forgotten'"):
        training.step(1)
    assert kept[0].held


@pytest.mark.parametrize(
    ("rss", "verdict"),
    [
        ([400 * MIB] * 100, "stayed flat"),
        ([400 * MIB + (step % 7) * MIB for step in range(100)], "stayed flat"),
        ([(400 - step) * MIB for step in range(100)], "stayed flat"),
        ([max(400, 450 - 10 * step) * MIB for step in range(100)], "stayed flat"),
        ([400 * MIB + step * MIB // 4 for step in range(100)], "grew"),
        ([400 * MIB + step * MIB // 4 + (step % 7) * MIB for step in range(100)], "grew"),
        ([400 * MIB] * 19, "too few steps"),
        ([400 * MIB], "too few steps"),
    ],
)
def test_flatness(rss: list[int], verdict: str) -> None:
    assert verdict in flatness(rss)
