"""Every test of Fit begins without garbage, and ends with an empty ledger.

On the CPU a budget is for the tensors born while any Fit lives: what the test before left counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tenure


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    yield
    if tenure.ledger().leases != 0:
        gc.collect()
    assert [str(row) for row in tenure.leases()] == []
