"""What may be said about an Offload that a trainer makes or enters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from tenure.errors import InputError
from tenure.offload import HostFull, Streams

__all__ = ["OffloadOptions", "need_options"]


class OffloadOptions(TypedDict, total=False):
    """The options of `tenure.Offload`, which explains them."""

    budget: int | str | None
    target: str
    host_limit: int | str | None
    host_full: HostFull
    streams: Streams
    min_bytes: int | str | None


def need_options(names: Iterable[str]) -> None:
    """Raises InputError, naming them, for options that Offload does not have."""
    unknown = [name for name in names if name not in OffloadOptions.__annotations__]
    if unknown:
        known = ", ".join(OffloadOptions.__annotations__)
        raise InputError(f"Offload has no option {', '.join(unknown)}: it has {known}")
