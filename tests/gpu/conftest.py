"""Tests that need a real accelerator. `tests/gpu/run` builds Tenure there and runs them."""

from __future__ import annotations

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def cuda() -> torch.device:
    """The device, with nothing of earlier tests on it."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return device
