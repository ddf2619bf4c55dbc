"""300 steps whose shapes change, which fail and write in place: gradients right, bytes flat."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tenure
from fitting import Job, budget_at, grads, probe
from offloading import MIB
from probes import assert_ends_well, needs_real_frees

SHAPES = (64, 96, 128)


class StepFailedError(Exception):
    pass


class Unsteady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.chance = random.Random(0)
        self.events = ""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for n, layer in enumerate(self.layers):
            y = nn.functional.silu(layer(y)).exp().tanh()
            if self.events == "forward" and n == 2:
                raise StepFailedError
            if self.events == "backward" and n == 2:
                y.register_hook(self.fail)
            if self.events == "write" and n == 1:
                z = y.sin()
                y = z + y.detach().clone().mul_(2)
            if self.events == "write source" and n == 1:
                x.add_(1)
        return y

    def fail(self, _grad: Tensor) -> None:
        raise StepFailedError


class Training:
    """One model, a Fit of it, and what its gradients must be."""

    def __init__(self) -> None:
        def make(rows: int) -> Job:
            model = Unsteady()
            return Job(model, lambda _: model(torch.ones(rows, 64)).square().sum())

        budget = budget_at(probe(make(SHAPES[-1])), 0.15)
        self.model = Unsteady()
        self.fit = tenure.Fit(self.model, budget=budget)
        self.chance = random.Random(0)
        self.seen: dict[str, int] = {}
        self.dropped = 0

    def gradients(self, x: Tensor, context: object) -> list[bytes] | str:
        self.model.zero_grad(set_to_none=True)
        try:
            with context:  # type: ignore[attr-defined]
                self.model(x).square().sum().backward()
        except StepFailedError:
            return "failed"
        return grads(self.model)

    def step(self) -> None:
        rows = SHAPES[0] if self.chance.random() < 0.6 else self.chance.choice(SHAPES)
        events = ["", "", "", "", "forward", "backward", "write", "write source"]
        event = self.model.events = self.chance.choice(events)
        x = torch.full((rows, 64), self.chance.random())
        plain = self.gradients(x.clone(), torch.enable_grad())
        ours = self.gradients(x, self.fit)
        assert ours == plain
        self.seen[event] = self.seen.get(event, 0) + 1
        self.dropped += self.fit.stats().dropped_bytes > 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.model.zero_grad(set_to_none=True)


@pytest.mark.filterwarnings("ignore:this step did not follow")
def test_gradients_are_right_and_nothing_is_left() -> None:
    training = Training()
    tracked = []
    for _ in range(3):
        training.run(100)
        tracked.append((tenure.ledger().leases, training.fit.stats().host_bytes))
    assert tracked == [(0, 0)] * 3
    assert min(training.seen.values()) > 10
    assert training.dropped > 60, "next to nothing was dropped: this tests nothing"


@needs_real_frees
def test_the_process_does_not_grow() -> None:
    """As the kernel counts it, in a process that does nothing else."""
    grown = assert_ends_well(f"""
        import sys, warnings
        warnings.simplefilter("ignore")
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        from probes import resident_bytes
        from test_long import Training

        training = Training()
        training.run(150)
        before = resident_bytes()
        training.run(300)
        print(resident_bytes() - before)
    """)
    assert int(grown) < MIB
