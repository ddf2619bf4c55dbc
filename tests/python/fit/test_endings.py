"""Exceptions, early exits, forks, threads and the end of the process."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tenure
from fitting import Job, deep, grads, inside, settle, tight
from probes import assert_ends_well

HERE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, tenure
from fitting import deep, inside, tight
job, fit = tight(deep)
for n in range(3):
    inside(job, n, fit)
"""


class StepFailedError(Exception):
    pass


def gradients(job: Job, fit: Any) -> list[bytes]:
    job.model.zero_grad(set_to_none=True)
    inside(job, 0, fit)
    return grads(job.model)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_exception(where: str, at: int) -> None:
    """In the profiled step, in the one that proves, or later: the others are not touched."""
    job, fit = tight(deep)
    job.loss(0).backward()
    plain = grads(job.model)
    layer = list(job.model.children())[7]
    failing = False

    def fail(*_: Any) -> None:
        if failing:
            raise StepFailedError

    layer.register_forward_hook(fail) if where == "forward" else (
        layer.register_full_backward_hook(fail)
    )
    for n in range(8):
        failing = n == at
        if failing:
            with pytest.raises(StepFailedError):
                gradients(job, fit)
        else:
            assert gradients(job, fit) == plain, n
    assert fit.stats().mode == "planned"
    assert fit.stats().remade_calls > 0


def test_ctrl_c_in_a_module_of_the_profiled_step_leaves_no_name() -> None:
    job = deep()
    fit = tenure.Fit(job.model, budget="1TiB")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = job.model[3].register_forward_hook(interrupt)  # type: ignore[index]
    with pytest.raises(KeyboardInterrupt), fit:
        job.loss(0)
    hook.remove()
    with fit:
        torch.ones(256, 64, requires_grad=True).cosh().cosh().sum().backward()
    assert {row.module for row in fit.plan.rows} == {""}


def test_an_operator_that_fails_and_is_caught_inside() -> None:
    job, fit = tight(deep)
    job.loss(0).backward()
    plain = grads(job.model)
    for n in range(5):
        job.model.zero_grad(set_to_none=True)
        with fit:
            loss = job.loss(0)
            with pytest.raises(RuntimeError):
                torch.ones(3) @ torch.ones(4)
            loss.backward()
        assert grads(job.model) == plain, n
    assert fit.stats().remade_calls > 0


def test_a_context_that_is_left_before_anything_happens() -> None:
    job, fit = tight(deep)
    for _ in range(3):
        gradients(job, fit)
    with fit:
        pass
    for _ in range(3):
        with fit:
            for n in range(3):
                job.loss(n)
                break
    job.model.zero_grad(set_to_none=True)
    job.loss(0).backward()
    plain = grads(job.model)
    assert gradients(job, fit) == plain


def test_a_backward_that_fails_and_is_repeated() -> None:
    job, fit = tight(deep)
    job.loss(0).backward()
    plain = grads(job.model)
    for _ in range(3):
        gradients(job, fit)
    job.model.zero_grad(set_to_none=True)
    fails = iter([True])

    def fail(*_: Any) -> None:
        if next(fails, False):
            raise StepFailedError

    job.model[3].register_full_backward_hook(fail)  # type: ignore[index]
    with fit:
        loss = job.loss(0)
        with pytest.raises(StepFailedError):
            loss.backward(retain_graph=True)
        job.model.zero_grad(set_to_none=True)
        loss.backward()
    assert grads(job.model) == plain


def test_two_threads_have_a_fit_each() -> None:
    jobs = [tight(deep) for _ in range(2)]
    jobs[0][0].loss(0).backward()
    plain = grads(jobs[0][0].model)
    wrong: list[int] = []

    def work(job: Job, fit: tenure.Fit) -> None:
        for n in range(20):
            try:
                if gradients(job, fit) != plain:
                    wrong.append(n)
            except tenure.BudgetError:
                pass  # the other one's tensors count, too

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_other_threads_are_not_watched() -> None:
    other = deep(1, rows=8)
    job, fit = tight(deep)
    for _ in range(3):
        gradients(job, fit)
    with fit:
        loss = job.loss(0)
        thread = threading.Thread(target=lambda: other.loss(0).backward())
        thread.start()
        thread.join()
        loss.backward()
    assert fit.stats().diverged == ""


def test_the_process_ends_with_a_graph_and_a_fit_alive() -> None:
    assert_ends_well(HERE + "with fit:\n    loss = job.loss(0)\n")


def test_the_process_ends_inside_the_context() -> None:
    assert_ends_well(HERE + "fit.__enter__()\nloss = job.loss(0)\n")


def test_a_fork_between_forward_and_backward() -> None:
    assert_ends_well(
        HERE
        + """
import os
with fit:
    loss = job.loss(0)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    loss.backward()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    del fit
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )


def test_a_forward_whose_graph_goes_inside_holds_nothing() -> None:
    job, fit = tight(deep)
    settle(job, fit)
    job.model.zero_grad(set_to_none=True)  # it is a level of its own
    with fit:
        job.loss(0)
    assert [str(row) for row in tenure.leases()] == []


def test_a_step_that_saves_nothing_is_not_said_to_leave_the_plan() -> None:
    job, fit = tight(deep)
    settle(job, fit)
    job.model.zero_grad(set_to_none=True)
    with warnings.catch_warnings(), torch.no_grad(), fit:
        warnings.simplefilter("error")
        job.loss(0)
    assert fit.stats().diverged == ""
    inside(job, 0, fit)
    assert fit.stats().mode == "planned"
