"""Steps that are not the profiled one: right gradients, one warning that says why, new plans."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitting import Job, grads, settle, tight
from offloading import Context


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.branch = "tanh"
        self.factor: Any = 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp().sin() * self.factor
        y = getattr(torch, self.branch)(y)
        return self.second(y.exp().cos()).sigmoid()


def branching() -> Job:
    model = Branching()
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)) / 8
    return Job(model, lambda rows: model(x[: rows or 256]).square().mean())


def gradients(job: Job, context: Context, rows: int = 0) -> list[bytes]:
    job.model.zero_grad(set_to_none=True)
    with context:
        job.loss(rows).backward()
    return grads(job.model)


def planned() -> Any:
    job, fit = tight(branching, part=0.4)
    settle(job, fit)
    return job, fit


def test_another_branch() -> None:
    job, fit = planned()
    job.model.branch = "sigmoid"
    plain = gradients(job, nullcontext())
    with pytest.warns(UserWarning, match=r"not follow its plan.*was aten::sigmoid, not aten::tanh"):
        assert gradients(job, fit) == plain
    assert "aten::sigmoid" in fit.stats().diverged
    assert fit.stats().mode == "following"


def test_another_shape() -> None:
    job, fit = planned()
    plain = gradients(job, nullcontext(), rows=32)
    with pytest.warns(UserWarning, match="of another size"):
        assert gradients(job, fit, rows=32) == plain
    assert fit.stats().diverged


@pytest.mark.parametrize(
    "factor", [torch.full((64,), 2.0), torch.tensor(2.0, dtype=torch.float64), 3, 2.5]
)
@pytest.mark.filterwarnings("ignore:this step did not follow")
def test_another_factor(factor: Any) -> None:
    """A number in the profile, and a tensor or another number later."""
    job, fit = planned()
    job.model.factor = factor
    plain = gradients(job, nullcontext())
    assert gradients(job, fit) == plain


def test_it_is_said_once() -> None:
    job, fit = planned()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (32, 0, 48, 0, 32, 0):
            gradients(job, fit, rows)
    assert len({str(warning.message) for warning in said}) == len(said) > 0


@pytest.mark.filterwarnings("ignore:this step did not follow")
def test_a_new_shape_gets_a_plan_of_its_own() -> None:
    job, fit = planned()
    plain = gradients(job, nullcontext(), rows=128)
    for _ in range(8):
        assert gradients(job, fit, rows=128) == plain
    assert fit.stats().mode == "planned"
    assert fit.stats().saved_bytes > 0
    assert fit.stats().diverged == ""


@pytest.mark.filterwarnings("ignore:this step did not follow")
def test_two_shapes_in_turn_are_both_planned_in_the_end() -> None:
    job, fit = planned()
    plain = {rows: gradients(job, nullcontext(), rows) for rows in (0, 128)}
    modes = []
    for n in range(12):
        rows = 128 * (n % 2)
        assert gradients(job, fit, rows) == plain[rows]
        modes.append(fit.stats().mode)
    assert modes[-4:] == ["planned"] * 4


@pytest.mark.filterwarnings("ignore:this step did not follow")
def test_a_step_that_ends_early() -> None:
    x = torch.randn(256, 64)
    job, fit = planned()

    def part(context: Context) -> list[bytes]:
        job.model.zero_grad(set_to_none=True)
        with context:
            job.model.first(x).exp().sin().sum().backward()
        return grads(job.model.first)

    assert part(fit) == part(nullcontext())
    assert fit.stats().diverged


class Hidden(nn.Module):
    """Its hidden activations are for whoever wants more of them than the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for layer in self.layers:
            y = layer(x)
            out.append((y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1))
            x = nn.functional.silu(out[-1])
        return [*out, x]


@pytest.mark.filterwarnings("ignore:this step did not follow")
@pytest.mark.parametrize("part", [0.5, 0.7])
@pytest.mark.parametrize("audit", [0.001, 1.0])
def test_what_was_dropped_is_saved_once_more(part: float, audit: float) -> None:
    """By a loss that is added in every second step."""

    def make() -> Job:
        model = Hidden()
        x = torch.randn(256, 64)

        def loss(more: int) -> Tensor:
            *hidden, y = model(x)
            out = y.square().mean()
            return out + sum(h.sin().mean() for h in hidden) if more else out

        return Job(model, loss)

    torch.manual_seed(0)
    job, fit = tight(make, part=part, audit=audit)
    settle(job, fit)
    plain = {more: gradients(job, nullcontext(), more) for more in (0, 1)}
    modes = []
    for n in range(14):
        assert gradients(job, fit, n % 2) == plain[n % 2], n
        modes.append(fit.stats().mode)
    assert modes[1] == "following"
    assert modes[-2:] == ["planned"] * 2
    assert fit.plan.denied == []


@pytest.mark.filterwarnings("ignore:this step did not follow")
@pytest.mark.parametrize("audit", [0.001, 1.0])
def test_a_backward_that_goes_further_than_the_profiled_one(audit: float) -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    one = torch.ones(())

    def make() -> Job:
        return Job(Hidden(), lambda _: x.sum())

    def run(job: Job, further: int, context: Context) -> None:
        with context:
            hidden = job.model(x)
            losses = [hidden[3].square().mean(), hidden[-1].square().mean()]
            torch.autograd.backward(losses[: 1 + further], [one] * (1 + further))

    def gradients(context: Context, further: int) -> list[bytes]:
        job.model.zero_grad(set_to_none=True)
        run(job, further, context)
        return grads(job.model)

    job, fit = tight(make, run, part=0.1, audit=audit)
    settle(job, fit, run)
    plain = {further: gradients(nullcontext(), further) for further in (0, 1)}
    assert gradients(fit, 0) == plain[0]
    assert gradients(fit, 1) == plain[1]
    assert "backward goes where it did not" in fit.stats().diverged
    for further in (0, 1, 0, 1, 0):
        assert gradients(fit, further) == plain[further]
    assert fit.plan.denied == []
