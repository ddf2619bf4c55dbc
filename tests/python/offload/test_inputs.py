"""Arguments that mean nothing are refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tenure


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": "x"}, "'x' is no number of bytes: write 12GiB, 500MB or 1048576"),
        ({"budget": 0}, "budget must be more than 0 bytes and is 0"),
        ({"budget": -1}, "budget must be more than 0 bytes and is -1"),
        ({"budget": "0 GiB"}, "budget must be more than 0 bytes and is '0 GiB'"),
        ({"budget": "-1GiB"}, "'-1GiB' is no number of bytes: write 12GiB, 500MB or 1048576"),
        ({"budget": 1.5}, "budget must be an int and is of type float"),
        ({"budget": 2**63}, "budget must be less than 2**63 bytes and is 9223372036854775808"),
        ({"budget": True}, "budget is a number of bytes, not True"),
        ({"host_limit": "many"}, "'many' is no number of bytes: write 12GiB, 500MB or 1048576"),
        ({"host_limit": 0}, "host_limit must be more than 0 bytes and is 0"),
        ({"host_full": "kep"}, 'host_full is "keep" or "raise", not \'kep\''),
        ({"streams": 3}, "streams is 0, 1 or 2, not 3"),
        ({"streams": -1}, "streams is 0, 1 or 2, not -1"),
        ({"streams": "2"}, "streams is 0, 1 or 2, not '2'"),
        ({"streams": 1.0}, "streams is 0, 1 or 2, not 1.0"),
        ({"min_bytes": []}, "min_bytes must be an int and is of type list"),
        ({"min_bytes": 0}, "min_bytes must be more than 0 bytes and is 0"),
        ({"target": "gpu"}, 'target is "host", "copy" or "disk:FOLDER", not \'gpu\''),
        ({"target": "disk"}, 'target is "host", "copy" or "disk:FOLDER", not \'disk\''),
        ({"target": "disk:"}, 'target is "host", "copy" or "disk:FOLDER", not \'disk:\''),
        ({"target": None}, 'target is "host", "copy" or "disk:FOLDER", not None'),
    ],
)
def test_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(tenure.InputError) as error:
        tenure.Offload(**({"target": "copy"} | options))
    assert str(error.value) == sentence


@pytest.mark.parametrize("model", [None, "net", torch.ones(2), torch.nn.Linear])
def test_what_is_no_module(model: Any) -> None:
    with pytest.raises(tenure.InputError, match=r"^Offload\(\) takes modules and got \w+$"):
        tenure.Offload(model, target="copy")


def test_a_list_of_modules_is_no_module() -> None:
    with pytest.raises(tenure.InputError, match="takes modules and got list"):
        tenure.Offload([torch.nn.Linear(2, 2)], target="copy")  # type: ignore[arg-type]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(tenure.InputError, match="nowhere"):
        tenure.Offload(target=f"disk:{tmp_path / 'nowhere'}")


@pytest.mark.parametrize("host_full", ["keep", "raise"])
def test_a_host_limit_of_a_megabyte(host_full: Any) -> None:
    """No error by itself: what it means for a step is in test_host.py."""
    offload = tenure.Offload(target="copy", host_limit="1MB", host_full=host_full)
    with offload:
        w = torch.ones(1000, 100, requires_grad=True)
        (w * 2).sin().sum().backward()
    assert offload.stats().moved_out_bytes == 400_000


def test_sizes_may_be_written_as_people_write_them() -> None:
    for budget in ("8GiB", "8 gib", "500MB", 1 << 30):
        tenure.Offload(target="copy", budget=budget)
