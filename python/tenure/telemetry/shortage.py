"""What an exception says of an allocation that failed: how much was asked for, and how much short.

>>> from tenure.telemetry.shortage import shortage_in
>>> found = shortage_in(RuntimeError("can't allocate memory: you tried to allocate 4096 bytes"))
>>> found.asked, found.device
(4096, 'cpu')
>>> shortage_in(ValueError("no such layer")) is None
True
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tenure import _C
from tenure.errors import CollectiveError

__all__ = ["Shortage", "shortage_in", "shortage_of_device"]

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"(?:tried to|unable to) allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_FREE = re.compile(r"of which ([\d.]+) (bytes|[KMGT]iB) is free")
_DEVICE = re.compile(r"\bGPU (\d+)\b")
_HOST = re.compile(r"can't allocate memory|not enough memory|std::bad_alloc")
_DEPTH = 32  # causes of causes


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed.

    Attributes:
        device: Where: ``cpu`` or ``cuda:0``.
        asked: Bytes, if it is known.
        free: Bytes that there were, if that is known.
        limit: What ran out, in words.
    """

    device: str
    asked: int | None = None
    free: int | None = None
    limit: str = ""

    @property
    def over(self) -> int | None:
        """By how much more than there was it asked for; None where memory was there in pieces."""
        if self.asked is None or self.free is None or self.asked <= self.free:
            return None
        return self.asked - self.free

    def as_json(self) -> dict[str, Any]:
        """As it is in headlines."""
        return {**asdict(self), "over": self.over}


def shortage_in(error: BaseException) -> Shortage | None:
    """The allocation that failed, if that is what the exception, or a cause of it, is about."""
    return next((found for found in map(_shortage, _causes(error)) if found), None)


def shortage_of_device(device: str, asked: int, free: int) -> Shortage:
    """As a device's allocator tells it."""
    return Shortage(device, asked, free, f"the memory of {device}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    for _ in range(_DEPTH):
        if at is None:
            return
        yield at
        at = at.__cause__ or at.__context__


def _shortage(error: BaseException) -> Shortage | None:
    if isinstance(error, CollectiveError):
        return None  # it may say that another rank ran out
    text = str(error)
    asked = _size(_ASKED.search(text))
    if isinstance(error, torch.OutOfMemoryError):
        index = _DEVICE.search(text)
        device = f"cuda:{index[1]}" if index else "cuda"
        return Shortage(device, asked, _size(_FREE.search(text)), f"the memory of {device}")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST.search(text)):
        free, limit = _least_free()
        return Shortage("cpu", asked, free, limit)
    return None


def _size(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    unit = next(size for name, size in _UNITS.items() if name.lower() == match[2].lower())
    return int(float(match[1]) * unit)


def _least_free() -> tuple[int | None, str]:
    """What the host has left by the tightest of its limits, and which one that is."""
    process = _C.sample().process
    left = [
        (limit - used, words)
        for limit, used, words in (
            (process.data_limit, process.data, "the process's data limit (ulimit -d)"),
            (
                process.virtual_limit,
                process.virtual_size,
                "the process's limit of address space (ulimit -v)",
            ),
        )
        if limit is not None and used is not None
    ]
    if process.cgroup is not None and process.cgroup.limit is not None:
        left.append((process.cgroup.limit - process.cgroup.usage, "the control group's limit"))
    if process.host_available is not None:
        left.append((process.host_available, "the machine's memory"))
    free, words = min(left, default=(None, ""))
    return (None if free is None else max(0, free)), words
