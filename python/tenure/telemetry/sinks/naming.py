"""The names under which loggers show figures."""

from __future__ import annotations

from tenure.telemetry.figures import Figures

__all__ = ["plain"]


def plain(figures: Figures) -> dict[str, int]:
    """Tenure's own names: a figure's key, after the section of the dashboard that it is shown in.

    Dashboards make a section of what comes before the first slash, so that each of these folds
    away by itself:

    - ``memory/device_allocated_bytes``: the highest (or lowest) among all ranks.
    - ``memory_rank/device_allocated_bytes``: the rank that has it. Not ``memory/…_bytes/rank``:
      loggers that keep a file for each name cannot have one inside another.
    - ``memory_stage_0/device_allocated_bytes``: the highest among the ranks of a pipeline stage.

    All are integers, in the unit that the name ends in.
    """
    named = {f"memory/{key}": figure.value for key, figure in figures.world.items()}
    named |= {f"memory_rank/{key}": figure.rank for key, figure in figures.world.items()}
    for stage, found in figures.stages.items():
        named |= {f"memory_stage_{stage}/{key}": figure.value for key, figure in found.items()}
    named["memory_rank/peak"] = figures.peak_rank
    named["memory/alerts"] = len(figures.alerts)
    named["memory/dropped_intervals"] = figures.dropped
    return named
