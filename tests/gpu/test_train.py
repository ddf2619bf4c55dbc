"""The training loop on CUDA, one rank: what is stored, moved or made again gives the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tenure import _C

STEPS = 8


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Reports:
    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.samples: list[list[int]] = []

    def stepped(self, report: dict[str, Any]) -> bool:
        self.all.append(report)
        return True

    def evaluated(self, _step: int, loss: float) -> None:
        assert 0 < loss < 10

    def sampled(self, _step: int, _prompt: list[int], tokens: list[int]) -> None:
        self.samples.append(tokens)

    def saved(self, _step: int, path: str) -> None:
        assert Path(path).is_dir()


def train(**options: Any) -> tuple[Reports, dict[str, torch.Tensor]]:
    config = _C.TrainConfig(
        kind="gpt2", layers=4, heads=4, kv_heads=4, width=256, hidden=1024, vocab=257, context=256
    )
    chosen: dict[str, Any] = {
        "rows": 16, "length": 256, "microbatches": 4, "steps": STEPS, "learning_rate": 1e-3,
        "device": torch.device("cuda"), "seed": 3,
    }  # fmt: skip
    chosen.update(options)
    job = _C.TrainJob(config, str(Path(json.__file__).parent), **chosen)
    group = dist.new_group([0], backend="gloo")
    device = dist.new_group([0])
    trainer = _C.Trainer(
        job,
        pipe_up=device,
        pipe_down=device,
        pipe_side=group,
        data_group=device,
        data_side=group,
        world_side=group,
        store=dist.HashStore(),
    )
    reports = Reports()
    trainer.run(reports)
    return reports, dict(trainer.weights())


def losses(reports: Reports) -> list[float]:
    return [report["loss"] for report in reports.all]


@pytest.mark.parametrize("bf16", [False, True])
def test_it_learns_within_its_bound_and_stays_flat(bf16: bool) -> None:
    reports, _ = train(steps=30, bf16=bf16)
    assert losses(reports)[-1] < losses(reports)[0] - 1
    ranks = [report["ranks"][0] for report in reports.all]
    assert len({rank["allocated"] for rank in ranks[2:]}) == 1
    for rank in ranks[2:]:
        assert 0 < rank["activations"] <= rank["activations_bound"] * 1.02


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"offload": "all"},
        {"recompute": True, "offload": "all"},
        {"fit": 1 << 30},
        {"zero": 3},
    ],
    ids=str,
)
def test_every_way_to_less_memory_learns_the_same(options: dict[str, Any]) -> None:
    plain, weights = train()
    found, others = train(**options)
    torch.testing.assert_close(losses(found), losses(plain), rtol=0, atol=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=1e-3, msg=name)


def test_an_odd_vocabulary_gives_the_cpus_logits() -> None:
    """Of 257 tokens: the head is padded on CUDA, and only there."""
    config = _C.TrainConfig(
        kind="gpt2", layers=2, heads=2, kv_heads=2, width=64, hidden=128, vocab=257, context=32
    )
    tokens = torch.arange(32).reshape(1, 32)
    here = _C.TrainStage(config, seed=1)(tokens)
    there = _C.TrainStage(config, device=torch.device("cuda"), seed=1)(tokens.cuda())
    assert there.shape == here.shape
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=2e-3)


def test_it_samples_evaluates_and_saves(tmp_path: Path) -> None:
    reports, _ = train(
        evaluate_every=4, sample_every=8, sample_tokens=8, checkpoints=str(tmp_path), bf16=True
    )
    assert [len(tokens) for tokens in reports.samples] == [8]
    resumed, _ = train(steps=STEPS + 2, checkpoints=str(tmp_path), resume=True, bf16=True)
    assert [report["step"] for report in resumed.all] == [STEPS + 1, STEPS + 2]
