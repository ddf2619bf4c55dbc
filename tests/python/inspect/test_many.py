"""Many processes: healthy ones that must not be accused, and leaking ones that are killed."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from tenure.inspect import recordings
from watched import ZOO, Marks, Nursery

HEALTHY = int(os.environ.get("TENURE_HEALTHY_RUNS", "40"))  # `make soak` does 200
BUGS = sorted(path.stem for path in ZOO.glob("*.py"))

# Kills its own process, as the kernel would, once a holder was written down.
KILLS_ITSELF = """
import os, runpy, signal, sqlite3, sys, threading, time
from pathlib import Path

def watch() -> None:
    while True:
        time.sleep(0.05)
        for file in Path("run.tenure").glob("*.sqlite"):
            try:
                with sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True) as connection:
                    if connection.execute("SELECT count(*) FROM holdings").fetchone()[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
            except sqlite3.OperationalError:
                pass

threading.Thread(target=watch, daemon=True).start()
sys.argv = [sys.argv[1], "--steps", "20000"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_of_many_healthy_runs_none_leaks(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path)
    for seed in range(HEALTHY):
        nursery.add(ZOO / "healthy" / "varied.py", "--seed", str(seed))
    runs = nursery.run()
    assert [run.code for run in runs] == [0] * HEALTHY
    said = {seed: run.verdict["verdict"] for seed, run in enumerate(runs)}
    assert {seed: word for seed, word in said.items() if word == "leak"} == {}
    # Nor is the other alarm given lightly.
    grown = [run.err for run in runs if run.verdict["verdict"] == "growth"]
    assert len(grown) <= max(1, HEALTHY // 100), grown


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("killed")
    wrapper = folder / "killed.py"
    wrapper.write_text(KILLS_ITSELF)
    nursery = Nursery(folder)
    for name in BUGS:
        nursery.add(wrapper, str(ZOO / f"{name}.py"))
    runs = nursery.run()
    assert {run.code for run in runs} == {-9}
    return dict(zip(BUGS, (run.folder for run in runs), strict=True))


@pytest.mark.parametrize("name", BUGS)
def test_killed_after_detection_it_still_has_its_path(killed: dict[str, Path], name: str) -> None:
    verdict = recordings.judge([killed[name]])
    assert verdict["verdict"] == "leak"
    suspect = verdict["suspects"][0]
    assert Marks.of(ZOO / f"{name}.py").holder in str(suspect["holders"])
    assert any(hop.get("leak") for hop in suspect["holders"][0])


def test_killed_it_is_right_up_to_the_last_second(killed: dict[str, Path]) -> None:
    (file,) = killed["kept_batches"].glob("*.sqlite")
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        query = "SELECT count(*), max(step) - min(step) + 1 FROM steps"
        steps, expected = connection.execute(query).fetchone()
    assert steps == expected >= 12  # none is missing
