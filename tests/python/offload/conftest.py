"""Every test of Offload ends with an empty ledger: nothing it saved is held any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tenure


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    if tenure.ledger().leases != 0:
        gc.collect()
    assert [str(row) for row in tenure.leases()] == []
