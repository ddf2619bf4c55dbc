"""Counts, sizes and names as a person reads them."""

from __future__ import annotations

__all__ = ["many", "plain", "size"]


def many(count: int, what: str) -> str:
    """``1 storage``, ``2,048 storages``."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def plain(text: str) -> str:
    """What a terminal may be given: names may have anything in them."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def size(nbytes: float) -> str:
    """``1,234.5 MB``, and ``12.3 kB`` for what is small."""
    return f"{nbytes / 1e6:,.1f} MB" if abs(nbytes) >= 5e4 else f"{nbytes / 1e3:,.1f} kB"
