"""Every test of core starts and ends with an empty ledger, outside of any scope."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tenure
from probes import current_scope


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    if tenure.ledger().leases != 0:
        gc.collect()
    assert [str(row) for row in tenure.leases()] == []
    assert current_scope() == "process"
