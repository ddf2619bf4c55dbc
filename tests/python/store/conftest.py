"""The member that a module's tests fetch from and put for."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

import tenure
from members import Member


@pytest.fixture(scope="module")
def trainer(monkeymodule: pytest.MonkeyPatch) -> Iterator[Member]:
    """This process is rollout 0; the fixture is trainer 0 of the same job."""
    monkeymodule.setenv("TENURE_STORE_SECRET", secrets.token_hex(16))
    job = f"fetching-{secrets.token_hex(4)}"
    tenure.store.leave()
    tenure.store.join(job, "rollout", 0)
    with Member(job, "trainer", 0) as member:
        yield member
    tenure.store.leave()


@pytest.fixture(scope="module")
def monkeymodule() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
