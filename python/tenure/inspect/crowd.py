"""Which ranks of a large job are traced, while the others are only counted.

One for each stage and role is, and whoever grows more than its peers do. They learn of each other
through the folder of the recordings, without a collective and on a thread of their own: each leaves
its growth as the name of an empty file, the lowest rank reads the names and leaves the medians, and
the others read those.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tenure.inspect.options import SUMMARY, Options, parse_ranks, rank_of, world_of

__all__ = ["Crowd", "at_first", "chooses", "growth_in", "represents"]

_FOLDER = ".crowd"
_MEDIANS = "medians"
_FEWEST = 4  # peers that make a median
_SPREADS = 4.0  # standard deviations, as the median of deviations tells them
_SHARE = 0.25  # of the median
_MATERIAL = 4096  # bytes a step
_ROUNDS = (0.0, 1.0, 2.0, 4.0)  # seconds between looks at what the others left
_SETTLE = 2.0  # seconds until those who came first are no longer the only ones
_SKEW = 60.0  # seconds that ranks may begin apart


def chooses(options: Options) -> bool:
    """Whether it is decided here who is traced, for nobody said so and there are many."""
    asked = options.ranks or options.level != "trace"
    return bool(options.out) and not asked and world_of() > options.many


def at_first(options: Options) -> Options:
    """How this process begins to be watched: as asked, or only counted."""
    if options.ranks:
        named = parse_ranks(options.ranks)
        counted = named is not None and rank_of() not in named
    else:
        counted = chooses(options) and _rank_in_role() != 0
    if not counted:
        return options
    return replace(options, level="count", cap=min(options.cap, SUMMARY))


def represents(place: Mapping[str, int]) -> bool:
    """Whether a rank with these coordinates is the lowest of its stage."""
    return bool(place) and not any(at for name, at in place.items() if name != "stage")


def _rank_in_role() -> int:
    given = os.environ.get("ROLE_RANK", "")
    return int(given) if given.isdigit() else rank_of()


def growth_in(judged: Mapping[str, Any]) -> int:
    """Bytes a step of the part that grows most, as the extension judged it; 0 if none does."""
    parts = [judged["total"], *judged["shares"]]
    return round(max((part["per_step"] for part in parts if part["grows"]), default=0.0))


@dataclass(frozen=True)
class _Mark:
    """What a rank leaves for the others: role, stage ("-": none), rank, pid, step, growth."""

    role: str
    stage: str
    rank: int
    pid: int
    step: int
    growth: int

    @property
    def name(self) -> str:
        return ".".join(map(str, self.__dict__.values()))

    @classmethod
    def parse(cls, name: str) -> _Mark | None:
        parts = name.split(".")
        if len(parts) != 6:
            return None
        try:
            return cls(parts[0], parts[1], *map(int, parts[2:]))
        except ValueError:
            return None

    def groups(self) -> list[str]:
        """Those that it is compared with, the closest first."""
        return [f"{self.role}.{self.stage}", self.role]


class Crowd:
    """This rank among the others of its job.

    Attributes:
        called: Why this rank is to be traced, once it stands out; empty until then.
    """

    def __init__(self, options: Options) -> None:
        """Nothing is left in the folder before :meth:`leave` is called."""
        self.called = ""
        self._folder = Path(options.out) / _FOLDER
        self._began = time.time()
        self._mark: _Mark | None = None  # what is to be left
        self._left: Path | None = None
        self._came = 0.0  # when it was first left
        self._told = False  # the medians are this rank's
        self._news = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def leave(self, step: int, growth: int, place: Mapping[str, int]) -> None:
        """Tells the others how this rank grows; returns at once."""
        name = os.environ.get("ROLE_NAME", "")
        role = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        stage = str(place.get("stage", "-"))
        self._mark = _Mark(role, stage, rank_of(), os.getpid(), step, growth)
        self._news.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tenure-crowd", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Leaves nothing behind."""
        self._ended.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(2.0)
        mine = [self._left, self._folder / _MEDIANS if self._told else None]
        for path in filter(None, mine):
            with contextlib.suppress(OSError):
                path.unlink()
        if self._left is not None:
            with contextlib.suppress(OSError):  # others are there yet
                self._folder.rmdir()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._news.wait()
            self._news.clear()
            for pause in _ROUNDS:
                if self._ended.wait(pause):
                    return
                with contextlib.suppress(OSError):  # a folder that is full or gone
                    self._look_around()
                if self._news.is_set():
                    break

    def _look_around(self) -> None:
        mark = self._mark
        if mark is None:
            return
        self._put(mark)
        medians = self._medians(mark)
        group = next((name for name in mark.groups() if name in medians), None)
        if group is None:
            return
        if time.monotonic() - self._came < _SETTLE:
            return
        median, spread, count = medians[group]
        bar = median + max(_SPREADS * 1.4826 * spread, _SHARE * abs(median), _MATERIAL)
        if mark.growth > bar and not self.called:
            whose = f"{count} ranks" + (f" of stage {mark.stage}" if "." in group else "")
            self.called = (
                f"memory grows by {mark.growth:,} bytes a step, the median of {whose} by "
                f"{round(median):,}"
            )

    def _put(self, mark: _Mark) -> None:
        path = self._folder / mark.name
        self._folder.mkdir(0o700, exist_ok=True)
        if self._left is not None:
            with contextlib.suppress(FileNotFoundError):
                self._left.replace(path)
        path.touch()
        if self._left is None:  # this folder's clock may not be this machine's
            self._began += path.stat().st_mtime - time.time()
            self._came = time.monotonic()
        self._left = path

    def _medians(self, mine: _Mark) -> dict[str, list[float]]:
        """By group: the median of growth, that of deviations from it, and how many there are."""
        told = self._read()
        groups: dict[str, list[float]] = told.get("groups", {})
        late = 3 * told.get("step", 0) < 2 * mine.step
        if told.get("by", mine.rank) < mine.rank and not late:
            return groups
        marks = [mark for mark in self._marks() if 2 * mark.step >= mine.step]
        if min(mark.rank for mark in [mine, *marks]) < mine.rank:
            return groups
        self._told = True
        groups = _medians_of(marks)
        beside = self._folder / f".{_MEDIANS}"
        beside.write_text(json.dumps({"by": mine.rank, "step": mine.step, "groups": groups}))
        beside.replace(self._folder / _MEDIANS)
        return groups

    def _read(self) -> dict[str, Any]:
        path = self._folder / _MEDIANS
        try:
            if path.stat().st_mtime < self._began - _SKEW:
                return {}
            told: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return told

    def _marks(self) -> list[_Mark]:
        """Those of this job, the oldest first; what an earlier one left is removed."""
        out: list[tuple[float, _Mark]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                mark = _Mark.parse(entry.name)
                if mark is None:
                    continue
                with contextlib.suppress(FileNotFoundError):  # it was just replaced
                    left = entry.stat().st_mtime
                    if left >= self._began - _SKEW:
                        out.append((left, mark))
                    else:
                        Path(entry.path).unlink()
        return [mark for _, mark in sorted(out, key=lambda one: one[0])]


def _medians_of(marks: list[_Mark]) -> dict[str, list[float]]:
    growth: dict[str, dict[int, int]] = {}  # by group and rank
    for mark in marks:
        for group in mark.groups():
            growth.setdefault(group, {})[mark.rank] = mark.growth
    out = {}
    for group, found in growth.items():
        if len(found) >= _FEWEST:
            middle = statistics.median(found.values())
            spread = statistics.median(abs(value - middle) for value in found.values())
            out[group] = [middle, spread, len(found)]
    return out
