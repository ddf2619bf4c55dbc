"""Every test of Offload ends with an empty ledger: nothing it saved is held any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tenure
from offloading import drop_graphs


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if tenure.ledger().leases != 0:
        gc.collect()
        if "fake" in request.fixturenames:
            drop_graphs()
    assert [str(row) for row in tenure.leases()] == []
