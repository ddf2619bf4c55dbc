"""What a monitor knows at one interval: the highest and lowest figures, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Figure", "Figures", "Key"]

Row = Mapping[str, int]  # by the keys' names; a figure that a rank does not have is not in it


@dataclass(frozen=True)
class Key:
    """One figure that ranks tell of themselves."""

    name: str  # "device_allocated_bytes"
    unit: str  # "bytes", "bytes per step", "permille", "count", "steps" or "microseconds"
    extreme: str  # "highest" or "lowest": which of all ranks' figures is told
    signed: bool
    help: str


@dataclass(frozen=True)
class Figure:
    """The highest or lowest figure among ranks, and the lowest rank that has it."""

    value: int
    rank: int


@dataclass(frozen=True)
class Figures:
    """One interval, for all ranks."""

    step: int
    time: float  # seconds since 1970, of the rank that tells
    rank: int  # that tells
    ranks: int
    keys: tuple[Key, ...]
    world: Mapping[str, Figure]  # by the keys' names; what no rank has is not in it
    stages: Mapping[int, Mapping[str, Figure]]  # the same among the ranks of each pipeline stage
    peak_rank: int  # the rank whose memory is highest
    peak_row: Row  # all of that rank's figures, of one moment
    rows: Mapping[int, Row] = field(default_factory=dict)  # by rank, at every tenth interval or so
    alerts: tuple[str, ...] = ()  # rules that this interval broke, in a sentence each
    dropped: int = 0  # intervals that slow sinks did not get, so far
