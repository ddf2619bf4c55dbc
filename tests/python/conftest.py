"""What every Python test may use: the helpers in this folder, and the fixture `fake`."""

from __future__ import annotations

import sys
from pathlib import Path

# With pytest's importlib mode nothing else puts this folder there.
sys.path.insert(0, str(Path(__file__).parent))

from fake_process import fake, pytest_configure, pytest_runtest_protocol

__all__ = ["fake", "pytest_configure", "pytest_runtest_protocol"]
