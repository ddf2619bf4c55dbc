"""How bench/fit.py measures: arms in turn, Fit beside the peer whose peak is its budget."""

from __future__ import annotations

import gc
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fit_arms import EAGER, Peer, eager, fitted, gib
from offload_arms import Arm, Job
from offload_bars import Bar, Step
from offload_device import GIB, Cpu, Device, host_free
from offload_rounds import first_line, said, say, timed

import tenure

MOST_WARM = 12  # steps until a Fit follows its plan
AFTER = 2  # and so many more: the proof, and one that is like all others
SLOWER = 1.01  # than a peer, at most
RECORDING = 1.01  # times eager, where nothing exceeds the budget
BAR = "bar"
# GiB and milliseconds, by length.
BARS = {8192: [(9.0, 168.0), (5.03, 180.0)], 32768: [(24.0, 1080.0), (8.73, 1160.0)]}
# On a CPU no allocator tells a peer's peak: these parts of eager's stand for them.
MADE_UP = (0.6, 0.8, 0.55, 0.5, 0.7)


@dataclass
class Found:
    """All that is known of one arm."""

    name: str
    budget: int | None = None
    asked: int | None = None  # a budget that could not be met
    group: int = 0
    rounds: dict[int, Step] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)  # of every step after the profile
    after: int | None = None
    said: dict[str, Any] = field(default_factory=dict)
    told: str = ""
    error: str | None = None

    def median(self, what: str) -> float:
        return statistics.median(getattr(step, what) for step in self.rounds.values())

    @property
    def seconds(self) -> float:
        return self.median("seconds")

    @property
    def peak(self) -> int:
        return max(self.peaks)

    @property
    def within(self) -> int:
        return sum(peak <= (self.budget or 0) for peak in self.peaks)

    def ratio(self, other: Found) -> float:
        """Of times, round by round where both ran in the same ones."""
        both = self.rounds.keys() & other.rounds.keys() if self.group == other.group else set()
        if not both:
            return self.seconds / other.seconds
        return statistics.median(
            self.rounds[n].seconds / other.rounds[n].seconds for n in sorted(both)
        )


@dataclass
class Run:
    """All arms at one length."""

    tokens: int
    founds: list[Found] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)  # a peer, and the Fit at its peak
    recording: str = ""  # the Fit whose budget nothing exceeds
    barred: list[tuple[float, float, str]] = field(default_factory=list)  # GiB, ms, and the Fit

    def get(self, name: str, group: int | None = None) -> Found | None:
        fit = [found for found in self.founds if found.name == name and found.rounds]
        return next((found for found in fit if found.group == group), fit[0] if fit else None)

    def to_eager(self, found: Found) -> float | None:
        other = self.get(EAGER, found.group)
        return None if other is None or not found.rounds else found.ratio(other)


@dataclass
class Point:
    """A budget to measure a Fit at, and whose it is."""

    what: str
    budget: int
    peer: Peer | None = None
    fit: str = ""  # that was measured


class Bench:
    """One length: looks at the peers first, then measures groups of them and of Fits in turn."""

    def __init__(self, device: Device, job: Job, tokens: int, rounds: int, same: float) -> None:
        self._device, self._job, self._rounds, self._same = device, job, rounds, same
        self._number = 0
        self._peaks: dict[str, int] = {}  # of peers
        self.run = Run(tokens)
        self._arms: dict[str, Arm] = {}
        self._founds: dict[str, Found] = {}
        job.resize(tokens)
        self.eager_peak = self._look_at_eager()

    def _look_at_eager(self) -> int:
        if isinstance(self._device, Cpu):
            fit = tenure.Fit(self._job.model, budget="1TiB")
            for _ in range(2):
                timed(self._device, self._job, Arm("", lambda: fit))
            return fit.stats().peak
        return max(timed(self._device, self._job, eager()).peak for _ in range(2))

    def scout(self, chosen: list[Peer]) -> dict[str, int]:
        """The peak of each peer that works: the lowest of three steps, as a first may have more."""
        peaks = self._peaks
        for number, peer in enumerate(chosen):
            try:
                arm = peer.make(self._job)
                peaks[peer.name] = min(timed(self._device, self._job, arm).peak for _ in range(3))
                if isinstance(self._device, Cpu):
                    peaks[peer.name] = int(MADE_UP[number % len(MADE_UP)] * self.eager_peak)
                say(f"{peer.name}: at most {gib(peaks[peer.name])}")
            except Exception as error:  # noqa: BLE001  what a peer raises is a result
                say(f"{peer.name} failed: {first_line(error)}")
                self.run.founds.append(Found(peer.name, error=first_line(error)))
            arm = None  # type: ignore[assignment]
            self._job.clear()
            if peer.alone:
                self._device.release()
        self._device.release()
        return peaks

    def groups(self, points: list[Point]) -> Iterator[Point]:
        """Measures all of them, as many at a time as the host has room for; eager in each group."""
        left = list(points)
        while left:
            yield from self._group(left)

    def _group(self, left: list[Point]) -> list[Point]:
        """Takes points from the front, and measures eager, their peers and Fits in turn."""
        self._arms, self._founds = {}, {}
        self._number += 1
        taken: list[Point] = []
        while left and (not taken or self._has_room()):
            point = left.pop(0)
            taken.append(point)
            point.fit = self._near(point.budget) or self._fit(point.budget)
            if point.peer is not None and point.peer.alone:
                break
        peers = [point.peer for point in taken if point.peer is not None]
        say(
            f"T {self.run.tokens}, group {self._number}: {', '.join(self._arms)}, {EAGER}"
            + "".join(f", {peer.name}" for peer in peers)
        )
        for name, make in [(EAGER, eager), *((p.name, partial(p.make, self._job)) for p in peers)]:
            self._add(Found(name))
            self._try(name, lambda name=name, make=make: self._arms.update({name: make()}))
            if name in self._arms:
                self._try(name, lambda name=name: self._step(name))
        self._in_turn()
        for found in self._founds.values():  # now: a run may be ended before it can show its tables
            if found.rounds:
                said = f"{found.name}: {1e3 * found.seconds:.1f} ms, {gib(found.peak)}"
                if found.budget is not None and found.within < len(found.peaks):
                    over = [f"{(peak - found.budget) / 2**20:.1f}" for peak in found.peaks]
                    said += f", above the budget by {', '.join(over)} MiB"
                say(said)
        for name in list(self._arms):
            self._try(name, lambda name=name: self._stop_after_forward(name))
        self._arms = {}
        self._job.clear()
        self._device.release()
        say(f"{host_free() / GIB:.1f} GiB of the host are free")
        return taken

    def _has_room(self) -> bool:
        """On the host, for another profile, which moves all that is saved."""
        return isinstance(self._device, Cpu) or host_free() > 1.05 * self.eager_peak + 6 * GIB

    def _near(self, budget: int) -> str | None:
        """A Fit of this group that does for that budget: a little lower, or at the least."""
        for found in self._founds.values():
            if found.budget is None or found.error is not None:
                continue
            if 0 <= budget - found.budget <= self._same * budget:
                return found.name
            if found.asked is not None and found.asked <= budget < found.budget:
                return found.name
        return None

    def _add(self, found: Found) -> Found:
        found.group = self._number
        self._founds[found.name] = found
        self.run.founds.append(found)
        return found

    def _fit(self, budget: int, asked: int | None = None) -> str:
        """Makes one and runs it until it follows its plan; at the least, if the budget is lower."""
        arm = fitted(self._job, budget)
        found = self._add(Found(arm.name, budget, asked))
        self._arms[arm.name] = arm
        self._try(arm.name, lambda: self._warm(arm.name))
        least = re.search(r"Give at least (\d+) bytes", found.error or "")
        if least is not None and asked is None:
            return self._fit(int(1.02 * int(least[1])), budget)
        return arm.name

    def _warm(self, name: str) -> None:
        begin, found = time.perf_counter(), self._founds[name]
        fit = self._arms[name].offload
        assert isinstance(fit, tenure.Fit)
        planned = 0
        for _ in range(MOST_WARM):
            step = timed(self._device, self._job, self._arms[name])
            if fit.stats().mode == "planned":
                found.peaks.append(self._peak(name, step))
                planned += 1
            if planned > AFTER:
                break
        else:
            why = fit.stats().diverged or fit.stats().mode
            raise RuntimeError(f"it does not follow a plan after {MOST_WARM} steps: {why}")
        found.told = str(fit)
        say(
            f"{name} is planned after {time.perf_counter() - begin:.1f} s: least "
            f"{gib(fit.plan.least)}, to make again {1e3 * fit.plan.recompute_seconds:.1f}"
            f" ms, exposed {1e3 * fit.plan.exposed_seconds:.1f}, "
            f"{gib(fit.stats().pinned_bytes)} pinned"
        )

    def _peak(self, name: str, step: Step) -> int:
        arm = self._arms[name]
        if isinstance(self._device, Cpu):
            told = self._peaks.get(name, self.eager_peak)
            return arm.offload.stats().peak if arm.offload is not None else told
        return step.peak

    def _step(self, name: str) -> Step:
        step = timed(self._device, self._job, self._arms[name])
        self._job.clear()
        return step

    def _in_turn(self) -> None:
        """Every arm once a round, in an order drawn anew: what ran before has warmed the device."""
        for number in range(self._rounds):
            names = list(self._arms)
            random.Random(number).shuffle(names)
            for name in names:
                self._try(name, partial(self._time, name, number))

    def _time(self, name: str, number: int) -> None:
        found, arm = self._founds[name], self._arms[name]
        step = self._step(name)
        found.rounds[number] = step
        found.peaks.append(self._peak(name, step))
        if arm.offload is not None:
            found.said = said(arm.offload)
            if found.said["diverged"]:
                say(f"{name} did not follow its plan: {found.said['diverged']}")

    def _stop_after_forward(self, name: str) -> None:
        arm = self._arms[name]
        self._job.clear()
        with self._job.checkpointing(arm.checkpoint), arm.context():
            loss = self._job.loss()
            self._device.rest()
            arm.settle()
            gc.collect()
            self._founds[name].after = self._device.allocated()
            loss.backward()

    def _try(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  what an arm raises is a result
            self._founds[name].error = first_line(error)
            self._arms.pop(name, None)
            say(f"{name} failed: {first_line(error)}")
        if self._founds[name].error is not None:  # out here: the error held the step's frames
            self._job.clear()
            self._device.release()


def measured(
    device: Device, job: Job, tokens: int, chosen: list[Peer], rounds: int, same: float
) -> Run:
    bench = Bench(device, job, tokens, rounds, same)
    run, top = bench.run, bench.eager_peak
    say(f"T {tokens}: eager has {gib(top)} at most")
    bars = BARS.get(tokens, [])
    if isinstance(device, Cpu):
        bars = [(0.75 * top / GIB, 1e6), (0.6 * top / GIB, 1e6)]
    peaks = bench.scout(chosen)
    points = [Point(peer.name, peaks[peer.name], peer) for peer in chosen if peer.name in peaks]
    barred = [Point(BAR, int(limit * GIB)) for limit, _ in bars]
    everything = Point("all", 4 * top)
    ordered = sorted([*points, *barred], key=lambda point: point.budget)
    alone = [point for point in ordered if point.peer is not None and point.peer.alone]
    together = [point for point in ordered if point not in alone]
    for point in bench.groups([*together, everything]):
        if point.peer is not None:
            run.pairs.append((point.peer.name, point.fit))
    for point in alone:
        run.pairs += [(found.what, found.fit) for found in bench.groups([point])]
    run.recording = everything.fit
    run.barred = [(*bar, point.fit) for bar, point in zip(bars, barred, strict=True)]
    return run


@dataclass(frozen=True)
class Beside:
    """A peer's point, and ours at no more memory."""

    peer: Found
    ours: Found

    @property
    def ratio(self) -> float:
        return self.ours.ratio(self.peer)

    @property
    def holds(self) -> bool:
        return self.ratio <= SLOWER and self.ours.peak <= self.peer.peak


def beside(run: Run) -> Iterator[Beside]:
    for peer, ours in run.pairs:
        theirs = run.get(peer)
        found = None if theirs is None else run.get(ours, theirs.group)
        if theirs is not None and found is not None:
            yield Beside(theirs, found)


def bars(run: Run) -> Iterator[Bar]:
    for limit, ms, name in run.barred:
        found = run.get(name)
        if found is not None:
            yield Bar(f"{gib(limit * GIB)}: peak", found.peak, limit * GIB, "GiB")
            yield Bar(f"{gib(limit * GIB)}: time", found.seconds, ms / 1e3, "ms")
    for found in run.founds:
        if found.budget is not None and found.rounds and found.name != run.recording:
            part = found.within / len(found.peaks)
            yield Bar(f"{found.name}: steps within the budget", part, 1.0, "", at_least=True)
    recording = run.get(run.recording)
    ratio = None if recording is None else run.to_eager(recording)
    if ratio is not None:
        yield Bar("a budget that nothing exceeds, × eager", ratio, RECORDING, "")
