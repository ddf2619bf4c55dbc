"""Medians with the range in which they surely lie, and what that says of a bar."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST = 6  # of fewer figures the range is narrower than it should be
_NOISE = "too noisy to tell"

__all__ = ["Range", "against", "verdict"]


@dataclass(frozen=True)
class Range:
    """The median of figures, and where it lies in 95 of 100 draws of as many of them."""

    middle: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, found: Sequence[float]) -> Range:
        draw = random.Random(0)
        again = sorted(statistics.median(draw.choices(found, k=len(found))) for _ in range(2000))
        return cls(statistics.median(found), again[50], again[-51], len(found))

    def text(self, digits: int = 4) -> str:
        return f"{self.middle:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def against(bar: float, found: Range) -> str:
    """Whether the whole range of a ratio is on one side of the bar.

    Nothing that is measured makes a step faster: a range that says so by more than the bar allows
    for costs is noise, too.
    """
    if found.count < _LEAST:
        return f"fewer than {_LEAST} rounds"
    if found.high < 2 - bar:
        return _NOISE
    return "holds" if found.high <= bar else "MISSED" if found.low > bar else _NOISE


def verdict(bar: float, witnesses: dict[str, Range]) -> str:
    """What the first of the witnesses says that is not too noisy to tell, and which it is."""
    for name, found in witnesses.items():
        if (said := against(bar, found)) in ("holds", "MISSED"):
            return f"{said} by {name}"
    return said
