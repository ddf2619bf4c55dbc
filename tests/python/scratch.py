"""Folders for ranks of tests, which have no fixtures."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from typing import Any

import tenure


def scratch_monitor(*args: Any, **options: Any) -> tenure.Monitor:
    """A monitor whose files go when the process ends."""
    folder = tempfile.mkdtemp(prefix="monitor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tenure.Monitor(*args, folder=folder, **options)
