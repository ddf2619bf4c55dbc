"""Samples: what the system and the device allocators say of this process's memory.

All figures are in bytes. One that this machine does not give is None, never zero.
"""

from __future__ import annotations

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure._C import (
    AllocatorSample,
    CgroupSample,
    DeviceSample,
    DriverSample,
    Gauge,
    MappedSample,
    PinnedSample,
    ProcessSample,
    Sample,
    SampleRefresh,
)

__all__ = [
    "AllocatorSample",
    "CgroupSample",
    "DeviceSample",
    "DriverSample",
    "Gauge",
    "MappedSample",
    "PinnedSample",
    "ProcessSample",
    "Sample",
    "SampleRefresh",
    "refresh_samples",
    "sample",
]


def sample() -> Sample:
    """Reads the figures now. Takes some microseconds and never wakes a device's runtime.

    Returns:
        ``process``, what the system says; ``devices``, one for each device that the program has
        used; ``pinned``, page-locked host memory, where there is such a device.

    Example:
        >>> import tenure
        >>> now = tenure.sample().process
        >>> 1 << 20 < now.rss < now.virtual_size
        True
    """
    return _C.sample()


def refresh_samples(period: float = 1.0) -> SampleRefresh:
    """Adds ``process.mapped`` to samples, PSS among it, for as long as the result lives.

    These figures take some milliseconds, 7 for each gigabyte, so a thread of their own reads them:
    every `period` seconds, or as often as takes 0.1 % of a core. ``mapped.age`` says how old they
    are.

    Args:
        period: Seconds, from a millisecond to a day. Where several ask, the shortest counts.

    Returns:
        A `with` block's object; ``stop()`` ends it early.

    Example:
        >>> import tenure
        >>> with tenure.refresh_samples(0.01):
        ...     while (mapped := tenure.sample().process.mapped) is None:
        ...         pass
        >>> mapped.pss <= mapped.rss
        True
    """
    return SampleRefresh(period)
