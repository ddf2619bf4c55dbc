"""All figures that ranks tell of themselves, by name and in order."""

from __future__ import annotations

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure.telemetry.figures import Key

__all__ = ["KEYS"]

KEYS = {key[0]: Key(*key) for key in _C.telemetry_keys()}
