"""Many healthy processes, none of which may be accused."""

from __future__ import annotations

import os
from pathlib import Path

from watched import ZOO, Nursery

HEALTHY = int(os.environ.get("TENURE_HEALTHY_RUNS", "40"))  # `make soak` does 200


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
