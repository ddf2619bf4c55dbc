"""Watching is inherited: torchrun, accelerate, Ray actors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tenure.inspect import recordings
from watched import QUIET, tenure_run

RANK = """
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(60):
    model(torch.randn(8, 64)).square().mean().backward()
    for p in model.parameters() if step < 20 else ():  # then neither waits for the other
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        kept.append(torch.randn(5000))
dist.destroy_process_group()
"""
BIN = Path(sys.executable).parent


def run_in(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=240,
        env={**os.environ, **QUIET, **variables},
    )


def assert_rank_1_leaks(folder: Path, said: str, written: dict[str, Any]) -> None:
    """By its recordings, by what was said, and by the verdict that was written for both ranks."""
    assert written["verdict"] == "leak", said
    assert [rank["rank"] for rank in written["ranks"]] == [0, 1]
    assert "FLAT" not in said
    assert said.rindex("LEAK") < said.rindex("on rank 1 of 2, stage 1; others flat")
    verdict = recordings.judge([folder])
    assert verdict["verdict"] == "leak"
    by_rank = {rank["rank"]: rank["verdict"] for rank in verdict["ranks"]}
    assert by_rank == {0: "flat", 1: "leak"}
    assert verdict["suspects"][0]["rank"] == 1
    assert "kept" in str(verdict["suspects"][0]["holders"])


def test_torchrun_starts_tenure(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    ended = run_in(
        tmp_path,
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tenure", "run", "--json", "verdict.json", "train.py"),
    )
    assert ended.returncode == 0, ended.stderr
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert_rank_1_leaks(tmp_path / "run.tenure", ended.stderr, written)


def test_tenure_starts_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    torchrun = [str(BIN / "torchrun")]
    if not Path(torchrun[0]).exists():  # this environment has the torch of another
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
    run = tenure_run([*torchrun, "--standalone", "--nproc-per-node", "2", "train.py"], tmp_path)
    assert run.code == 0, run.err
    assert_rank_1_leaks(run.folder, run.err, run.verdict)


def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import torch
            from accelerate import Accelerator
            accelerator = Accelerator(cpu=True)
            model = torch.nn.Linear(64, 64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            kept = []
            for step in range(40):
                loss = model(torch.randn(8, 64)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                kept.append(loss)
                kept.append(model(torch.randn(64, 64)))
            """
        )
    )
    launcher = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1", "train.py"]
    run = tenure_run(launcher, tmp_path)
    assert run.code == 0, run.err
    verdict = recordings.judge([run.folder])
    assert verdict["verdict"] == "leak", run.err
    assert "kept (global of train.py)" in str(verdict["suspects"][0]["holders"])


def test_ray_actors(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "job.py").write_text(
        textwrap.dedent(
            """
            import json, os, subprocess, sys, time
            import ray
            variables = json.loads(subprocess.check_output(
                [sys.executable, "-m", "tenure", "env", "--out", "run.tenure", "--as", "json"]))
            ray.init(num_cpus=2, include_dashboard=False, runtime_env=variables)

            @ray.remote
            class Trainer:
                def __init__(self):
                    import torch
                    self.torch, self.kept = torch, []
                    self.model = torch.nn.Linear(64, 64)
                    self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
                def step(self, leak):
                    self.model(self.torch.randn(8, 64)).square().mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if leak:
                        self.kept.append(self.torch.randn(5000))

            actors = [Trainer.remote() for _ in range(2)]
            for _ in range(60):
                ray.get([actor.step.remote(i == 1) for i, actor in enumerate(actors)])
            time.sleep(1)  # Ray kills its actors, and the last second of what is killed may be lost
            ray.shutdown()
            """
        )
    )
    ended = run_in(tmp_path, sys.executable, "job.py", RAY_DEDUP_LOGS="0")
    assert ended.returncode == 0, ended.stderr
    verdict = recordings.judge([tmp_path / "run.tenure"])
    assert verdict["verdict"] == "leak", ended.stderr
    assert sorted(rank["verdict"] for rank in verdict["ranks"]) == ["flat", "leak"]
    assert ".kept of Trainer" in str(verdict["suspects"][0]["holders"])


def test_ranks_that_a_program_spawns(tmp_path: Path) -> None:
    """Which no variable numbers."""
    body = textwrap.indent(RANK.split("dist.init_process_group", 1)[1].split("\n", 1)[1], "    ")
    (tmp_path / "train.py").write_text(
        "import torch\nimport torch.distributed as dist\n\n"
        "def train(rank, at):\n"
        "    dist.init_process_group('gloo', init_method=at, rank=rank, world_size=2)\n"
        f"{body}\n"
        "if __name__ == '__main__':\n"
        f"    torch.multiprocessing.spawn(train, ('file://{tmp_path}/meet',), nprocs=2)\n"
    )
    run = tenure_run(["train.py"], tmp_path)
    assert run.code == 0, run.err
    assert_rank_1_leaks(run.folder, run.err, run.verdict)
