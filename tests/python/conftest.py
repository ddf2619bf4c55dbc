"""What every Python test may use: the helpers in this folder, and the fake accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

# With pytest's importlib mode nothing else puts this folder there.
sys.path.insert(0, str(Path(__file__).parent))

from fake_process import pytest_configure, pytest_runtest_protocol  # noqa: E402

__all__ = ["fake", "pytest_configure", "pytest_runtest_protocol"]


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    """The fake accelerator (tests/fake_accelerator), as new, and so again afterwards.

    A test that asks for it runs in another process than those that do not; see fake_process.py.
    """
    import fake_accelerator

    yield fake_accelerator
    fake_accelerator.reset()
