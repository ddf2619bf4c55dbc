"""Intervals as a monitor tells them to sinks, of as many ranks as a test wants."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenure.telemetry.figures import Figure, Figures, Key

ROOT = Path(__file__).resolve().parents[2]
_ENTRY = re.compile(
    r'\{"(?P<name>\w+)", Unit::(?P<unit>\w+), k(?P<extreme>High|Low), (?P<signed>\w+),\s*'
    r'"(?P<help>[^"]+)"\}'
)
KEYS = tuple(
    Key(
        found["name"],
        found["unit"].replace("_", " "),
        {"High": "highest", "Low": "lowest"}[found["extreme"]],
        found["signed"] == "true",
        found["help"],
    )
    for found in _ENTRY.finditer((ROOT / "tenure/telemetry/keys.cpp").read_text())
)
assert len(KEYS) > 40, "keys.cpp is not written as it was"


def row(rank: int, step: int = 10) -> dict[str, int]:
    """A rank's figures: every key, each with a value of its own; rank 2 of four is fullest."""
    fill = (rank % 4 == 2) + rank % 8 / 1000
    told = {key.name: 1_000_003 * (number + 1) + rank for number, key in enumerate(KEYS)}
    told |= {key.name: int(100 + 50 * fill) for key in KEYS if key.unit in {"permille", "count"}}
    told["device_allocated_bytes"] = int(40_000_000_001 + 20e9 * fill)
    told["device_headroom_permille"] = int(500 - 250 * fill)
    told["device_growth_bytes_per_step"] = 1_200_000
    told |= {"steps_left": 3000, "steps_left_earliest": 2500, "steps_left_latest": 4000}
    return told | {"step": step, "step_microseconds": 1_500_000 + rank}


def interval(step: int = 10, ranks: int = 4, stages: int = 2, **changes: Any) -> Figures:
    """One interval of `ranks` ranks in `stages` stages, with all ranks' rows."""
    rows = {rank: row(rank, step) for rank in range(ranks)}
    members = [[rank for rank in rows if rank % stages == stage] for stage in range(stages)]
    made = Figures(
        step=step,
        time=1_700_000_000.25 + step,
        rank=0,
        ranks=ranks,
        keys=KEYS,
        world=extremes(rows, list(rows)),
        stages={stage: extremes(rows, who) for stage, who in enumerate(members)},
        peak_rank=max(rows, key=lambda rank: rows[rank]["device_allocated_bytes"]),
        peak_row=rows[0],
        rows=rows,
    )
    return replace(made, **changes)


def extremes(rows: dict[int, dict[str, int]], ranks: list[int]) -> dict[str, Figure]:
    best = {"highest": max, "lowest": min}
    found = {}
    for key in KEYS:
        rank = best[key.extreme](ranks, key=lambda rank: rows[rank][key.name])
        found[key.name] = Figure(rows[rank][key.name], rank)
    return found


def without(figures: Figures, *starts: str) -> Figures:
    """The same of a machine that does not give figures whose names begin so."""

    def kept(told: Any) -> dict[str, Any]:
        return {name: value for name, value in told.items() if not name.startswith(starts)}

    return replace(
        figures,
        world=kept(figures.world),
        stages={stage: kept(told) for stage, told in figures.stages.items()},
        rows={rank: kept(told) for rank, told in figures.rows.items()},
        peak_row=kept(figures.peak_row),
    )
