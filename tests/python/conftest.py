"""What every Python test may use: the helpers in this folder, and the fixture `fake`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# With pytest's importlib mode nothing else puts this folder there.
sys.path.insert(0, str(Path(__file__).parent))

# A shell starts what runs in the background with SIGINT ignored, and all that this process starts
# would inherit that. Tests that send it must not depend on how they were started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from fake_process import fake, pytest_configure, pytest_runtest_protocol

__all__ = ["fake", "pytest_configure", "pytest_runtest_protocol"]
