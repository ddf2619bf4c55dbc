"""What bench/offload.py found: each arm, the floor of the copy engine, and the bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from offload_arms import FRACTIONS, Reference
from offload_device import GIB

AFTER_WITH_CHECKPOINTING = {8192: 2.31 * GIB}


@dataclass(frozen=True)
class Step:
    seconds: float
    forward: float
    backward: float
    peak: int


@dataclass
class Found:
    """All that is known of one arm."""

    name: str
    group: int
    budget: int | None = None
    steps: list[Step] = field(default_factory=list)
    held: int = 0  # bytes of the device at rest beyond none's
    after: int | None = None
    out: int | None = None
    back: int | None = None
    pinned: int | None = None
    said: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def median(self, what: str) -> float:
        return statistics.median(getattr(step, what) for step in self.steps)

    @property
    def seconds(self) -> float:
        return self.median("seconds")

    @property
    def peak(self) -> int:
        return max(step.peak for step in self.steps)


@dataclass(frozen=True)
class Floor:
    """What compute and the copy engine leave possible, from the same run."""

    forward: float
    backward: float
    out: float  # bytes a second
    back: float

    def best(self, moved: float) -> float:
        return max(self.forward, moved / self.out) + max(self.backward, moved / self.back)

    def hides(self, moved: float) -> bool:
        return moved / self.out <= self.forward and moved / self.back <= self.backward


@dataclass
class Run:
    """All arms at one length, and what they are measured by."""

    tokens: int
    reference: Reference
    bandwidth: tuple[float, float]
    founds: list[Found] = field(default_factory=list)

    def get(self, name: str, group: int | None = None) -> Found | None:
        """An arm that was timed, preferably of that group."""
        fit = [found for found in self.founds if found.name == name and found.steps]
        return next((found for found in fit if found.group == group), fit[0] if fit else None)

    def floor(self, group: int) -> Floor | None:
        none = self.get("none", group)
        if none is None:
            return None
        return Floor(none.median("forward"), none.median("backward"), *self.bandwidth)

    def movable(self) -> float:
        """A: what none holds after forward and save_on_cpu does not."""
        peer = self.get("save_on_cpu")
        if peer is None or not peer.after:
            return self.reference.activations
        return self.reference.after - peer.after

    def must_move(self, found: Found) -> float | None:
        """The bytes of T*: A, or what the budget lacks; None for an arm that moves little."""
        if found.name in {"trl", "save_on_cpu", "ours"}:
            return self.movable()
        if found.budget is None:
            return None
        return max(0, self.reference.peak - found.budget)

    def efficiency(self, found: Found) -> float | None:
        """T* / T."""
        moved, floor = self.must_move(found), self.floor(found.group)
        if moved is None or floor is None or not found.steps:
            return None
        return floor.best(moved) / found.seconds

    def exposed(self, found: Found) -> float | None:
        """Seconds beyond the same job without any copies, where that is an arm."""
        if found.name == "selective":
            return None
        base = self.get("checkpointing" if "checkpointing" in found.name else "none", found.group)
        if base is None or base is found or not found.steps:
            return None
        return found.seconds - base.seconds


@dataclass(frozen=True)
class Bar:
    what: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def texts(self) -> list[str]:
        form = {"GiB": lambda x: f"{x / GIB:.2f} GiB", "ms": lambda x: f"{1e3 * x:.1f} ms"}.get(
            self.unit, lambda x: f"{x:.3f}"
        )
        sign = "≥" if self.at_least else "≤"
        verdict = "holds" if self.holds else "MISSED"
        return [self.what, form(self.measured), f"{sign} {form(self.limit)}", verdict]


def bars(run: Run) -> Iterator[Bar]:
    """Every bar for which both sides were measured."""
    yield from _all(run)
    for fraction in FRACTIONS:
        found = run.get(f"ours@{fraction}")
        if found is not None:
            yield from _budget(run, found)
    yield from _with_checkpointing(run)


def _all(run: Run) -> Iterator[Bar]:
    ours, peer = run.get("ours"), run.get("save_on_cpu")
    if ours is None:
        return
    if peer is not None:
        yield Bar("ours: peak to save_on_cpu's", ours.peak, 1.05 * peer.peak, "GiB")
        if ours.after and peer.after:
            # To the hundredth of a GiB in which the bar is given.
            most = peer.after + GIB / 200
            yield Bar("ours: drained, to its after-forward", ours.after, most, "GiB")
    efficiency = run.efficiency(ours)
    if efficiency is not None:
        yield Bar("ours: T*/T", efficiency, 0.92, "", at_least=True)
    held = ours.said.get("most_host_bytes", ours.out)
    if ours.pinned and held:
        yield Bar("ours: pinned to the most it held at once", ours.pinned / held, 1.05, "")
    yield from _beside_trl(run, ours)


def _budget(run: Run, found: Found) -> Iterator[Bar]:
    if found.budget is None:
        return
    yield Bar(f"{found.name}: peak within the budget", found.peak, found.budget, "GiB")
    efficiency = run.efficiency(found)
    if efficiency is not None:
        yield Bar(f"{found.name}: T*(A_b)/T", efficiency, 0.9, "", at_least=True)
    floor, none = run.floor(found.group), run.get("none", found.group)
    moved = run.must_move(found)
    if floor is not None and none is not None and moved is not None and floor.hides(moved):
        ratio = found.seconds / none.seconds
        yield Bar(f"{found.name}: A_b fits under compute, × none", ratio, 1.03, "")
    yield from _beside_trl(run, found)


def _beside_trl(run: Run, found: Found) -> Iterator[Bar]:
    """Not slower than TRL, whichever of the two needs more memory."""
    trl = run.get("trl", found.group)
    if trl is not None:
        yield Bar(f"{found.name}: to TRL's time", found.seconds, trl.seconds, "ms")


def _with_checkpointing(run: Run) -> Iterator[Bar]:
    ours = run.get("ours+checkpointing")
    if ours is None:
        return
    alone, trl = run.get("checkpointing", ours.group), run.get("checkpointing+trl")
    if alone is not None:
        ratio = ours.seconds / alone.seconds
        yield Bar("ours+checkpointing: × checkpointing", ratio, 1.01, "")
    limit = AFTER_WITH_CHECKPOINTING.get(run.tokens)
    if limit is not None and ours.after:
        yield Bar("ours+checkpointing: after forward", ours.after, limit, "GiB")
    if trl is not None and trl.after and ours.after:
        yield Bar("ours+checkpointing: after forward, to TRL's", ours.after, trl.after, "GiB")
