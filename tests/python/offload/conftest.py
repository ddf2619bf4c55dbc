"""Every test of Offload begins without garbage, and ends with an empty ledger.

Budgets are for all that a process has on the device: what the test before left would count.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tenure
from offloading import drop_graphs


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    yield
    if tenure.ledger().leases != 0:
        gc.collect()
        if "fake" in request.fixturenames:
            drop_graphs()
    assert [str(row) for row in tenure.leases()] == []
