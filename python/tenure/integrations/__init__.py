"""Tenure inside the trainers of others, which are imported only when asked for.

>>> import tenure
>>> tenure.integrations.trl.disable()  # was never enabled, and trl need not be installed
"""

from __future__ import annotations

from tenure.integrations import areal, lightning, transformers, trl
from tenure.integrations.options import OffloadOptions

__all__ = ["OffloadOptions", "areal", "lightning", "transformers", "trl"]
