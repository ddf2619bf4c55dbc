"""One hierarchy of errors, the same in C++ and Python."""

from __future__ import annotations

import pickle

import pytest
import torch

import tenure


@pytest.mark.parametrize(
    "name",
    ["UseAfterRelease", "ReleaseError", "ScopeError", "LeaseError", "MutationError", "InputError"],
)
def test_every_error_is_a_tenure_error(name: str) -> None:
    assert issubclass(getattr(tenure, name), tenure.TenureError)


def test_all_of_them_are_runtime_errors() -> None:
    """Code that catches what ATen raises catches what Tenure raises."""
    assert issubclass(tenure.TenureError, RuntimeError)


def test_bad_arguments_are_value_errors() -> None:
    with pytest.raises(ValueError, match="unknown owner kind"):
        tenure.hold(torch.ones(1), "test", kind="nonsense")


def test_tenures_own_calls_raise_the_class_itself() -> None:
    x = torch.ones(4)
    tenure.release(x)
    with pytest.raises(tenure.UseAfterRelease, match="^UseAfterRelease: storage"):
        tenure.release(x)


def test_aten_raises_a_runtime_error_with_the_same_text() -> None:
    x = torch.ones(4)
    tenure.release(x)
    with pytest.raises(RuntimeError, match="^UseAfterRelease: storage") as raised:
        x.sum()
    assert not isinstance(raised.value, tenure.TenureError)


def test_errors_can_be_sent_to_another_process() -> None:
    with pytest.raises(tenure.InputError) as raised:
        tenure.scope("").open()
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (type(copied), str(copied)) == (tenure.InputError, str(raised.value))
