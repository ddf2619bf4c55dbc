"""Arguments that mean nothing are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tenure
from fitting import deep, inside


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": "x"}, "'x' is no number of bytes: write 12GiB, 500MB or 1048576"),
        ({"budget": 0}, "budget must be more than 0 bytes and is 0"),
        ({"budget": -1}, "budget must be more than 0 bytes and is -1"),
        ({"budget": 1.5}, "budget must be an int and is of type float"),
        ({"budget": True}, "budget is a number of bytes, not True"),
        ({"budget": None}, "budget must be an int and is of type NoneType"),
        ({"host_limit": "many"}, "'many' is no number of bytes: write 12GiB, 500MB or 1048576"),
        ({"streams": 3}, "streams is 0, 1 or 2, not 3"),
        ({"streams": True}, "streams is 0, 1 or 2, not True"),
        ({"audit": 2}, "audit is a part from 0 to 1, not 2"),
        ({"audit": -0.1}, "audit is a part from 0 to 1, not -0.1"),
        ({"audit": float("nan")}, "audit is a part from 0 to 1, not nan"),
        ({"audit": "all"}, "audit is a part from 0 to 1, not 'all'"),
        ({"audit": True}, "audit is a part from 0 to 1, not True"),
    ],
)
def test_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(tenure.InputError) as error:
        tenure.Fit(**({"budget": "1GiB"} | options))
    assert str(error.value) == sentence


def test_a_budget_must_be_given() -> None:
    with pytest.raises(TypeError, match="budget"):
        tenure.Fit()  # type: ignore[call-arg]


@pytest.mark.parametrize("model", [None, "net", torch.ones(2), torch.nn.Linear, [torch.nn.ReLU()]])
def test_what_is_no_module(model: Any) -> None:
    with pytest.raises(tenure.InputError, match=r"^Fit\(\) takes modules and got \w+$"):
        tenure.Fit(model, budget="1GiB")


def test_one_entered_twice() -> None:
    job = deep()
    fit = tenure.Fit(job.model, budget="1TiB")
    with fit, pytest.raises(tenure.InputError) as error, fit:
        pass
    assert str(error.value) == "this Fit is entered already: leave it first"
    inside(job, 0, fit)
    assert fit.plan.rows != []


def test_one_inside_another() -> None:
    job = deep()
    outer, inner = (tenure.Fit(job.model, budget="1TiB") for _ in range(2))
    with outer, pytest.raises(tenure.InputError, match="on this thread already"), inner:
        pass
    for fit in (inner, outer):
        inside(job, 0, fit)
        assert fit.plan.rows != []


def test_a_frontier_before_any_step() -> None:
    with pytest.raises(tenure.InputError, match="no frontier: nothing is planned yet"):
        tenure.Fit(budget="1GiB").frontier()


@pytest.mark.parametrize("points", [0, -1, 2.5, True])
def test_a_frontier_of_no_points(points: Any) -> None:
    job = deep()
    fit = tenure.Fit(job.model, budget="1TiB")
    inside(job, 0, fit)
    with pytest.raises(tenure.InputError, match="one point or more"):
        fit.frontier(points)
