"""Lengths that come at random: each step follows the plan of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenure
from fitting import Job, budget_at, grads, probe

LENGTHS = (64, 128, 256, 384, 511, 512)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(50, 64), nn.Embedding(512, 64)
        self.layers = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(64, 64), nn.SiLU(), nn.LayerNorm(64)))
        )

    def batch(self, length: int) -> Tensor:
        return torch.full((length, 64), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Words(Rows):
    def batch(self, length: int) -> Tensor:
        return torch.arange(length) % 50

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.words(x) + self.places(torch.arange(len(x))))


class Places(Words):
    """Begins with what works on nothing, as GPT-2 does."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x))
        return Rows.forward(self, self.places(places) + self.words(x))


def run(model: Rows, length: int, context: Any) -> list[bytes]:
    x = model.batch(length)
    model.zero_grad(set_to_none=True)
    with context:
        model(x).backward()
    return grads(model)


@pytest.mark.parametrize(("kind", "unplanned"), [(Rows, 0), (Words, 0), (Places, 6)])
def test_each_step_follows_the_plan_of_its_length(kind: type[Rows], unplanned: int) -> None:
    of_probe, model = kind(), kind()
    job = Job(of_probe, lambda _: of_probe(of_probe.batch(LENGTHS[-1])))
    fit = tenure.Fit(model, budget=budget_at(probe(job), 0.5))
    draw = random.Random(0)
    modes = []
    for step in range(100):
        length = draw.choice(LENGTHS)
        plain = run(model, length, torch.enable_grad())
        assert run(model, length, fit) == plain, step
        modes.append(fit.stats().mode)
    assert modes[50:].count("planned") >= 50 - unplanned, modes


def test_a_length_that_is_new_is_learnt_among_known_ones() -> None:
    model = Rows()
    fit = tenure.Fit(model, budget="1TiB")
    draw = random.Random(1)
    modes: dict[int, list[str]] = {length: [] for length in LENGTHS}
    for step in range(120):
        length = draw.choice(LENGTHS[:-1] if step < 40 else LENGTHS)
        run(model, length, fit)
        modes[length].append(fit.stats().mode)
    assert all(of_length[-3:] == ["planned"] * 3 for of_length in modes.values()), modes
