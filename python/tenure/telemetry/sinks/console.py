"""A line an interval, for a person who watches a terminal."""

from __future__ import annotations

import sys

from tenure.inspect.words import many, plain, size
from tenure.telemetry.figures import Figure, Figures

__all__ = ["Console"]


class Console:
    """One line an interval to standard error, and one for each alert.

    ``step 120 · device 61,203.5 MB on rank 3, stage 1 · headroom 4.1 % on rank 3 · +1.2 MB/step``
    """

    name = "console"

    def __init__(self, *, width: int = 160) -> None:
        """Lines are cut at `width` characters."""
        self._width = max(width, 20)

    def open(self) -> None:
        """Nothing to do."""

    def write(self, figures: Figures) -> None:
        """Prints the line. To what is standard error now: notebooks and tests change it."""
        lines = [summary(figures), *(f"step {figures.step} · alert: {a}" for a in figures.alerts)]
        sys.stderr.write("".join(self._cut(plain(line)) + "\n" for line in lines))
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing to do."""

    def _cut(self, line: str) -> str:
        line = line.replace("\n", " ")
        return line if len(line) <= self._width else line[: self._width - 1] + "…"


def summary(figures: Figures) -> str:
    """The interval in a line: who has most, who has least left, and where that leads."""
    world = figures.world
    # A job with a device is told of the device: that is what it runs out of.
    at = "device" if "device_allocated_bytes" in world else "host"
    used = "device_allocated_bytes" if at == "device" else "host_rss_bytes"
    parts = [f"step {figures.step}"]
    if used in world:
        parts.append(f"{at} {size(world[used].value)} {_whose(figures, used)}")
    if (left := world.get(f"{at}_headroom_permille")) is not None:
        parts.append(f"headroom {left.value / 10:.1f} % {_rank(figures, left)}".rstrip())
    if (growth := world.get(f"{at}_growth_bytes_per_step")) is not None:
        parts.append(f"{'+' if growth.value >= 0 else '-'}{size(abs(growth.value))}/step")
    if (forecast := world.get("steps_left")) is not None:
        full = f"full at step {figures.step + forecast.value:,}{_between(figures)}"
        parts.append(f"{full} {_rank(figures, forecast)}")
    if figures.dropped:
        parts.append(f"{many(figures.dropped, 'interval')} lost by slow sinks")
    return " · ".join(part.rstrip() for part in parts)


def _rank(figures: Figures, figure: Figure) -> str:
    return f"on rank {figure.rank}" if figures.ranks > 1 else ""


def _whose(figures: Figures, key: str) -> str:
    figure = figures.world[key]
    stages = (stage for stage, row in figures.stages.items() if row.get(key) == figure)
    stage = next(stages, None) if len(figures.stages) > 1 else None
    return _rank(figures, figure) + ("" if stage is None else f", stage {stage}")


def _between(figures: Figures) -> str:
    """Each is the lowest of all ranks': only those of one rank are a range."""
    earliest = figures.world.get("steps_left_earliest")
    latest = figures.world.get("steps_left_latest")
    ranks = {figures.world["steps_left"].rank}
    if earliest is None or latest is None or ranks != {earliest.rank, latest.rank}:
        return ""
    return f" ({figures.step + earliest.value:,} to {figures.step + latest.value:,})"
