"""Tests with the fixture `fake` run elsewhere and report here, whatever becomes of them there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = "from fake_process import fake, pytest_configure, pytest_runtest_protocol\n"

FIRST = """
import os
import pytest

@pytest.fixture(scope="module")
def shared():
    yield os.getpid()

def test_before(shared, record_pid):
    record_pid("here")

def test_passes(fake, record_pid):
    record_pid("there")

@pytest.mark.skip(reason="not today")
def test_is_skipped(fake):
    pass

def test_fails(fake):
    print("said elsewhere")
    assert fake.device_count() == 3
"""

SECOND = """
import os

def test_after(record_pid):
    record_pid("here")

def test_dies(fake):
    os.abort()

def test_has_no_process_left(fake):
    pass
"""

RECORD_PID = """
import os
import pathlib
import pytest

@pytest.fixture
def record_pid():
    def record(name):
        with (pathlib.Path(__file__).parent / name).open("a") as file:
            file.write(f"{os.getpid()} ")
    return record
"""


def test_reports_come_from_the_other_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST + RECORD_PID)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    (tmp_path / "pytest.ini").touch()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    outcomes = {
        line.split()[1]: line.split()[0] for line in run.stdout.splitlines() if "::" in line
    }
    assert outcomes == {
        "test_first.py::test_before": "PASSED",
        "test_first.py::test_passes": "PASSED",
        "test_first.py::test_fails": "FAILED",
        "test_second.py::test_after": "PASSED",
        "test_second.py::test_dies": "FAILED",
        "test_second.py::test_has_no_process_left": "FAILED",
    }, run.stdout
    assert "assert 2 == 3" in run.stdout
    assert "not today" in run.stdout
    assert "said elsewhere" in run.stdout
    assert "process ended with -6" in run.stdout
    here, there = ((tmp_path / name).read_text().split() for name in ("here", "there"))
    assert len(set(here)) == 1
    assert here[0] != there[0]
