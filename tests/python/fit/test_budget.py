"""A budget is kept in every step after the proof, and one that cannot be is refused by name."""

from __future__ import annotations

import re
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tenure
from fitting import Job, budget_at, deep, grads, inside, probe, settle, tight


def allocated_at_most(work: Any) -> int:
    """The most that torch's CPU allocator had given out at once meanwhile, beyond the begin."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    level = most = 0
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            most = max(most, level)
    return most


@pytest.mark.parametrize("part", [0.25, 0.6, 0.9])
@pytest.mark.parametrize("audit", [0.001, 1.0])
def test_it_is_kept_in_every_step_after_the_proof(part: float, audit: float) -> None:
    budget = budget_at(probe(deep()), part)
    job = deep()
    fit = tenure.Fit(job.model, budget=budget, audit=audit)
    for n in range(10):
        job.model.zero_grad(set_to_none=True)
        inside(job, n, fit)
        if n > 1:
            assert fit.stats().peak <= budget, n
            assert fit.stats().peak <= fit.stats().promised * 1.02
    assert fit.stats().mode == "planned"


class Residual(nn.Module):
    """Autograd does not save what is added up; all that it saves can be made of that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.down(nn.functional.silu(self.up(self.weight * norm.to(x.dtype))))


def residuals() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual(64) for _ in range(8)]).to(torch.bfloat16)
    x = torch.randn(512, 64, dtype=torch.bfloat16)
    return Job(model, lambda n: model(x + n).float().square().mean())


@pytest.mark.parametrize("part", [0.03, 0.08, 0.15, 0.3, 0.5])
def test_what_others_are_made_of_goes_with_its_last_use(part: float) -> None:
    job = residuals()
    fit = tenure.Fit(job.model, budget=budget_at(probe(residuals()), part), audit=0)
    for n in range(6):
        job.model.zero_grad(set_to_none=True)
        inside(job, n, fit)
        if n > 1:
            assert fit.stats().peak <= fit.stats().promised
    assert fit.stats().dropped_bytes > 0


def test_a_saved_tensor_that_is_looked_at_too_often_is_named() -> None:
    job = residuals()
    fit = tenure.Fit(job.model, budget=budget_at(probe(residuals()), 0.1), audit=0)

    def look(node: object) -> None:
        for name in ("_saved_self", "_saved_other", "_saved_result"):
            getattr(node, name, None)

    for n in range(4):
        inside(job, n, fit)
    with fit, pytest.raises(RuntimeError, match="asked for more often than in the step that was"):
        loss = job.loss(5)
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                look(node)
                nodes += [following for following, _ in node.next_functions]
        loss.backward()


class Chains(nn.Module):
    """Autograd saves the two ends of each chain, a small and a large one, and nothing between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x.sin().repeat(1, 4)
            for n in range(8):
                x = (x + n) * 0.5
            x = layer(x)
        return x


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_what_a_long_chain_is_made_of_goes_while_it_is_made(audit: float) -> None:
    def make() -> Job:
        model = Chains()
        x = torch.randn(512, 16)
        return Job(model, lambda n: model(x + n).square().mean())

    job, fit = tight(make, part=0.1, audit=audit)
    settle(job, fit)
    assert fit.stats().remade_calls > 16
    assert fit.stats().peak <= fit.stats().promised


def test_what_others_had_for_a_step_ends_no_training() -> None:
    job, fit = tight(deep, part=0.5)
    settle(job, fit)
    job.model.zero_grad(set_to_none=True)
    others: list[Tensor] = []
    thread = threading.Thread(
        target=lambda: others.append(torch.zeros(fit.stats().budget, dtype=torch.uint8))
    )
    with fit:
        loss = job.loss(0)
        thread.start()
        thread.join()
        loss.backward()
    others.clear()
    del loss
    assert fit.stats().peak > fit.stats().budget
    settle(job, fit)
    assert fit.stats().peak <= fit.stats().budget


def test_it_is_kept_by_what_the_profiler_counts() -> None:
    plain = deep()
    all_kept = allocated_at_most(lambda: plain.loss(0).backward())
    least = budget_at(probe(deep()), 0.25)
    job = deep()
    fit = tenure.Fit(job.model, budget=least)
    settle(job, fit)
    job.model.zero_grad(set_to_none=True)
    most = allocated_at_most(lambda: inside(job, 4, fit))
    assert fit.stats().mode == "planned"
    assert most <= least < all_kept


def test_what_is_kept_and_what_is_made_again_are_all_that_is_saved() -> None:
    job = deep()
    fit = tenure.Fit(job.model, budget=budget_at(probe(deep()), 0.4))
    settle(job, fit)
    stats = fit.stats()
    assert stats.moved_out_bytes == 0
    assert 0 < stats.dropped_bytes < stats.saved_bytes


def test_plenty_drops_nothing() -> None:
    job = deep()
    fit = tenure.Fit(job.model, budget="1TiB")
    for n in range(3):
        inside(job, n, fit)
    assert fit.stats().dropped_bytes == fit.stats().remade_calls == 0
    assert fit.stats().mode == "planned"


def test_below_the_least_the_least_is_said_and_works() -> None:
    job = deep()
    with pytest.raises(tenure.BudgetError, match="cannot be met") as error:
        inside(job, 0, tenure.Fit(job.model, budget="1KiB"))
    job.model.zero_grad(set_to_none=True)
    found = re.search(r"Give at least (\d+) bytes", str(error.value))
    assert found is not None
    del error
    budget = int(1.2 * int(found[1]))  # times are measured anew, and with them what is the least
    fit = tenure.Fit(job.model, budget=budget)
    settle(job, fit)
    assert fit.stats().peak <= budget


def test_a_refused_step_is_whole_and_the_next_one_may_try_again() -> None:
    job = deep()
    job.loss(0).backward()
    plain = [p.grad.clone() for p in job.model.parameters() if p.grad is not None]
    fit = tenure.Fit(job.model, budget="1KiB")
    for _ in range(2):
        job.model.zero_grad(set_to_none=True)
        with pytest.raises(tenure.BudgetError):
            inside(job, 0, fit)
        assert all(
            torch.equal(p.grad, grad)
            for p, grad in zip(job.model.parameters(), plain, strict=True)
            if p.grad is not None
        )


def test_a_model_that_saves_nothing() -> None:
    model = nn.Flatten()
    fit = tenure.Fit(model, budget="1MiB")
    x = torch.ones(4, 4, requires_grad=True)
    for _ in range(3):
        with fit:
            model(x).sum().backward()
    assert fit.stats().dropped_bytes == 0
    said = "nothing is planned: autograd saved nothing in the last step that could go"
    assert str(fit).splitlines()[1] == f"  {said}"
    with pytest.raises(tenure.InputError, match=said):
        fit.frontier()


def test_what_is_said_after_a_refusal() -> None:
    job = deep()
    fit = tenure.Fit(job.model, budget="1KiB")
    with pytest.raises(tenure.BudgetError):
        inside(job, 0, fit)
    said = r'no plan meets the budget of 1.0 KiB, the least is \d.*: .*one step with budget="1TiB"'
    assert re.search(said, str(fit))
    with pytest.raises(tenure.InputError, match=said):
        fit.frontier()


def test_a_level_that_grows_has_plans_within_the_budget() -> None:
    """By one percent of the budget a step."""
    job, fit = tight(deep, part=0.7)
    plain = deep()
    others: list[Tensor] = []
    modes = []
    with pytest.warns(UserWarning, match="grows from step to step, by .* KiB since") as warned:
        for n in range(20):
            others.append(torch.zeros(fit.stats().budget // 100, dtype=torch.uint8))
            job.model.zero_grad(set_to_none=True)
            inside(job, n, fit)
            ours = grads(job.model)
            plain.model.zero_grad(set_to_none=True)
            plain.loss(n).backward()
            assert ours == grads(plain.model)
            plain.model.zero_grad(set_to_none=True)
            modes.append(fit.stats().mode)
            if modes[-1] == "planned":
                assert fit.stats().peak <= fit.stats().budget, n
    assert modes[:3] == ["measuring", "measuring", "proving"]
    assert set(modes[3:]) == {"planned"}
    assert len(warned) == 1


def test_a_level_that_comes_and_goes_is_seldom_profiled() -> None:
    job, fit = tight(deep, part=0.7)
    others: list[Tensor] = []
    modes = []
    for n in range(60):
        others.append(torch.zeros(fit.stats().budget // 100, dtype=torch.uint8))
        if n % 6 == 5:
            others.clear()
        job.model.zero_grad(set_to_none=True)
        inside(job, n, fit)
        modes.append(fit.stats().mode)
        if modes[-1] == "planned":
            assert fit.stats().peak <= fit.stats().budget, n
    assert modes.count("planned") > 50


def test_shapes_in_turn_at_levels_that_grow() -> None:
    job, fit = tight(deep, part=0.9)
    others: list[Tensor] = []
    modes = []
    x = torch.randn(256, 64)
    for n in range(24):
        others.append(torch.zeros(fit.stats().budget // 150, dtype=torch.uint8))
        job.model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with fit:
                (job.model(x).square().mean() if n % 2 else job.loss(n)).backward()
        modes.append(fit.stats().mode)
        if modes[-1] == "planned":
            assert fit.stats().peak <= fit.stats().budget, n
    assert modes[12:].count("planned") > 9


def test_a_level_that_leaves_no_room_is_refused() -> None:
    job, fit = tight(deep, part=0.3)
    settle(job, fit)
    other = torch.zeros(fit.stats().budget, dtype=torch.uint8)
    for _ in range(3):
        job.model.zero_grad(set_to_none=True)
        with pytest.raises(tenure.BudgetError):
            inside(job, 0, fit)
    del other
    settle(job, fit)


def test_a_frontier_knows_of_what_an_optimizer_has_made_since() -> None:
    """With a budget that nothing exceeds, of which it is a small part."""
    job = deep()
    fit = tenure.Fit(job.model, budget="1TiB")
    optimizer = torch.optim.AdamW(job.model.parameters())
    for n in range(4):
        optimizer.zero_grad()
        inside(job, n, fit)
        optimizer.step()
        assert max(p.peak for p in fit.frontier().points) == pytest.approx(
            fit.stats().peak, rel=0.02
        )
    assert fit.stats().mode == "planned"


def test_a_model_none_of_whose_activations_can_be_made_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(), nn.Dropout(), nn.Dropout())
    x = torch.ones(64, 64, requires_grad=True)
    job = Job(model, lambda _: model(x).sum())
    with pytest.raises(tenure.BudgetError, match="Give at least"):
        inside(job, 0, tenure.Fit(model, budget="1KiB"))
