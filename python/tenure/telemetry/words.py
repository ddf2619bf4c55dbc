"""Figures as people read them. Without torch: `tenure top` uses it, too."""

from __future__ import annotations

__all__ = ["bytes_text", "value_text"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(size: float) -> str:
    """1536 -> '1.5 KiB', as C++ writes it; also below zero."""
    value, unit = abs(float(size)), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    sign = "-" if size < 0 else ""
    return f"{sign}{value:.0f} B" if unit == 0 else f"{sign}{value:.1f} {_UNITS[unit]}"


def value_text(key: str, value: int) -> str:
    """A figure with the unit that its key ends in."""
    if key.endswith("_bytes_per_step"):
        return f"{bytes_text(value)}/step"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if key.endswith("_permille"):
        return f"{value / 10:.1f} %"
    if key.endswith("_microseconds"):
        return f"{value / 1000:,.1f} ms"
    return f"{value:,}"
