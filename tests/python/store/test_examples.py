"""The store's examples run: handles through Ray or Gloo, tensors through the store, memory flat."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gives_back import GIVES_BACK

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def said_by(*words: str) -> str:
    ended = subprocess.run(
        [sys.executable, *words],
        env=os.environ
        | GIVES_BACK
        | {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check(said: str, batch_megabytes: float) -> None:
    """It learned, what was put is gone, and of fifteen steps' batches memory has not four."""
    end = re.search(r"paid (\S+) at the end; memory grew by (\S+) MB", said)
    assert end, said
    assert float(end[1]) > 0.5, said  # a quarter is what guessing pays
    assert float(end[2]) < 4 * batch_megabytes, said


def test_torchrun() -> None:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    said = said_by(*run, str(EXAMPLES / "store_torchrun.py"), "--steps", "30", "--rows", "1024")
    check(said, batch_megabytes=2 * 1024 * 1024 * 4 / 1e6)
    for rank in (1, 2):
        assert f"rollout {rank}: put 90 tensors, 126 MB, and has 0 of them now" in said
    assert re.search(r"version 0, asked for now: .* in weights 0 .*closed", said), said


def test_ray() -> None:
    pytest.importorskip("ray", reason="ray is not installed: make test-integrations does it")
    said = said_by(str(EXAMPLES / "store_ray.py"), "--steps", "30", "--rows", "1024")
    check(said, batch_megabytes=2 * 1024 * 1024 * 4 / 1e6)
    assert "the rollouts put 180 tensors, 252 MB, and have 0 of them now" in said
