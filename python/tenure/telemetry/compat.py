"""The names, units and rounding of other programs, so that their dashboards go on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tenure.errors import InputError
from tenure.telemetry.figures import Figures

if TYPE_CHECKING:
    from tenure.telemetry.sinks.sink import Names

__all__ = ["COMPAT", "megatron_bridge", "megatron_bridge_in_mlflow", "names_like"]

_GIGABYTES = {
    f"memory/mem-{top}{kind}-gigabytes": f"device_{kind}{key}_bytes"
    for top, key in (("", ""), ("max-", "_top"))
    for kind in ("allocated", "active", "inactive", "reserved")
}
_COUNTS = {
    "memory/mem-alloc-retires": "device_retries",  # their spelling
    "memory/mem-allocated-count": "device_blocks",
}


def megatron_bridge(figures: Figures) -> dict[str, int | float]:
    """Megatron-Bridge's names, as it gives them to TensorBoard, W&B and Comet.

    Gigabytes are 1e9 bytes, to 5 significant digits, and rounded after the ranks' figures were
    compared, not before. Theirs are the highest among one pipeline's ranks, these among all.
    Counts stay integers. Their ``mem-max-…`` are since the start, as here.

    Example:
        >>> from tenure.telemetry.figures import Figure, Figures
        >>> world = {"device_reserved_bytes": Figure(8_123_456_789, 3)}
        >>> megatron_bridge(Figures(10, 0.0, 0, 4, (), world, {}, 3, {}))
        {'memory/mem-reserved-gigabytes': 8.1235}
    """
    named: dict[str, int | float] = {}
    for name, key in _GIGABYTES.items():
        if key in figures.world:
            named[name] = _five_digits(figures.world[key].value / 1e9)
    for name, key in _COUNTS.items():
        if key in figures.world:
            named[name] = figures.world[key].value
    return named


def megatron_bridge_in_mlflow(figures: Figures) -> dict[str, int | float]:
    """The same as Megatron-Bridge gives them to MLflow: ``memory_mem-reserved-gigabytes``."""
    return {name.replace("/", "_"): value for name, value in megatron_bridge(figures).items()}


COMPAT: dict[str, Names] = {"megatron-bridge": megatron_bridge}


def names_like(program: str) -> Names:
    """The names of `program`; raises InputError for one that is not known here."""
    if program not in COMPAT:
        raise InputError(f"compat {program!r} is not known: there is {', '.join(COMPAT)}")
    return COMPAT[program]


def _five_digits(value: float) -> float:
    return round(value, 4 - math.floor(math.log10(abs(value)))) if value else value
