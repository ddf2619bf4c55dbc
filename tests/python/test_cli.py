"""The command line's own manners: help, version, and answers to what it does not understand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tenure
from tenure.cli import app


def run_program(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "program",
    [[str(Path(sys.executable).with_name("tenure"))], [sys.executable, "-m", "tenure"]],
    ids=["tenure", "python -m tenure"],
)
def test_both_ways_to_start_it(program: list[str]) -> None:
    done = run_program(*program, "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"tenure {tenure.__version__}\n"


def test_help_lists_the_commands() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert "info" in done.stdout
    assert "demo" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inof"], "No such command 'inof'. Did you mean 'info'?"),
        (["demo", "--stepz", "3"], "No such option: --stepz"),
        (["demo", "--steps", "0"], "Invalid value for '--steps'"),
        (["demo", "--steps", "many"], "Invalid value for '--steps'"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["demo", "--seed", "99999999999999999999"], "Invalid value for '--seed'"),
        (["demo", "--device", "qpu"], "nothing can be trained on 'qpu' here"),
        (["demo", "--device", "hpu"], "nothing can be trained on 'hpu' here: "),
        (["demo", "--device", "meta"], "nothing can be trained on 'meta' here"),
        (["info", "surplus"], "unexpected extra argument"),
    ],
)
def test_what_it_does_not_understand(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
