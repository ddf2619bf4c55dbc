"""A batch in microbatches: what is split, what is in all of them, and what each counts."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

import tenure
from tenure.pipelining.microbatches import join, rows_of, split

Pair = namedtuple("Pair", ["left", "right"])


def test_a_tensor_is_split_along_its_first_dimension() -> None:
    batch = torch.arange(24).reshape(6, 4)
    parts = split(batch, 3, "input")
    assert [part.tolist() for part in parts] == [
        batch[0:2].tolist(),
        batch[2:4].tolist(),
        batch[4:6].tolist(),
    ]


@pytest.mark.parametrize(("rows", "microbatches"), [(7, 3), (10, 4), (5, 5), (13, 1), (9, 8)])
def test_sizes_differ_by_one_at_most(rows: int, microbatches: int) -> None:
    batch = torch.arange(rows)
    parts = split(batch, microbatches, "input")
    sizes = [len(part) for part in parts]
    assert len(parts) == microbatches
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(parts), batch)


def test_nothing_is_copied() -> None:
    batch = torch.zeros(4, 2)
    split(batch, 2, "input")[1][0, 0] = 5
    assert batch[2, 0] == 5


def test_gradients_reach_what_was_split() -> None:
    batch = torch.ones(4, requires_grad=True)
    split(batch, 2, "input")[1].sum().backward()
    assert batch.grad is not None
    assert batch.grad.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "nest",
    [
        lambda one: (one, one),
        lambda one: [one, [one, ()]],
        lambda one: {"a": one, "b": {"c": one}},
        lambda one: OrderedDict(z=one, a=one),
        lambda one: Pair(one, {"x": [one]}),
        lambda one: ((one,), {"mask": one}),
    ],
)
def test_a_nest_keeps_its_form(nest: Any) -> None:
    batch = torch.arange(5)
    parts = split(nest(batch), 2, "input")
    for part, rows in zip(parts, (batch[:3], batch[3:]), strict=True):
        want = nest(rows)
        assert type(part) is type(want)
        assert str(part) == str(want)


def test_what_is_no_tensor_is_in_all_of_them() -> None:
    mark = object()
    parts = split((torch.arange(4), mark, "text", None, 3.5), 2, "input")
    assert [part[1:] for part in parts] == [(mark, "text", None, 3.5)] * 2


def test_a_tensor_of_no_dimension_is_in_all_of_them() -> None:
    scale = torch.tensor(2.0)
    parts = split({"x": torch.arange(4), "scale": scale}, 4, "input")
    assert all(part["scale"] is scale for part in parts)


@pytest.mark.parametrize("given", [None, (), {}, "text", torch.tensor(1)])
def test_without_a_batch_all_are_what_was_given(given: Any) -> None:
    assert split(given, 3, "input") == [given] * 3


def test_tensors_of_other_rows_are_refused() -> None:
    with pytest.raises(tenure.InputError, match="the target has tensors of 4 and 6 rows"):
        split((torch.zeros(6), {"y": torch.zeros(4, 2)}), 2, "target")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_batch_that_is_too_small_is_refused(rows: int) -> None:
    with pytest.raises(
        tenure.InputError, match=f"the input has {rows} rows, too few for 4 microbatches"
    ):
        split(torch.zeros(rows, 2), 4, "input")


def test_rows_are_those_of_the_first_dimension() -> None:
    assert rows_of(split(torch.zeros(10, 3), 4, "target")) == [3, 3, 2, 2]


def test_rows_of_a_nest_are_those_of_its_tensors() -> None:
    targets = split({"scale": torch.tensor(1.0), "y": torch.zeros(3)}, 2, "target")
    assert rows_of(targets) == [2, 1]


@pytest.mark.parametrize("parts", [[], [None, None], [torch.tensor(1.0)] * 2, ["a", "b"]])
def test_what_is_no_batch_has_no_rows(parts: list[Any]) -> None:
    assert rows_of(parts) == []


def test_what_was_split_is_joined() -> None:
    batch = torch.arange(10)
    assert torch.equal(join([[part] for part in split(batch, 4, "input")])[0], batch)


def test_numbers_are_one_for_each_microbatch() -> None:
    assert join([[torch.tensor(1.0)], [torch.tensor(2.0)]])[0].tolist() == [1, 2]


def test_none_stays_none() -> None:
    rows, nothing = join([[torch.zeros(2), None], [torch.ones(1), None]])
    assert rows.tolist() == [0, 0, 1]
    assert nothing is None


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([[torch.zeros(1)], [None]], "output 0 of the last stage is None for some microbatches"),
        ([[], [torch.zeros(1)]], "returned 0 and 1 outputs for different microbatches"),
    ],
)
def test_outputs_that_differ_in_form_are_refused(outputs: list[Any], said: str) -> None:
    with pytest.raises(tenure.InputError, match=said):
        join(outputs)
