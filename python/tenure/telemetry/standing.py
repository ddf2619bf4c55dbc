"""How each rank stands: what a row of `tenure top` says, which rank is worst, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tenure.inspect.words import many, plain
from tenure.telemetry.rings import FAILED, Ring
from tenure.telemetry.words import bytes_text

__all__ = [
    "COLUMNS",
    "OWNERS",
    "SORTS",
    "Column",
    "Standing",
    "headline",
    "in_order",
    "standing",
    "summary",
]

OWNERS = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "offloaded_bytes": "offloaded",
    "receive_buffers_bytes": "receive buffers",
    "stored_objects_bytes": "stored objects",
    "other_bytes": "other",
}
LITTLE = 50  # permille of headroom below which a rank is in danger, and twice that: to be watched
_STATES = ("died", "failed", "silent", "running", "ended")  # the worst first

SORTS = ("rank", "memory", "headroom", "growth")


@dataclass(frozen=True)
class Standing:
    """One rank now. What it does not tell is None."""

    rank: int
    ranks: int
    stage: int
    stages: int
    role: str
    host: str
    state: str  # as Ring.state
    told: str  # the same in words
    why: str = ""  # it failed, in a line
    step: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    memory: int | None = None  # of the device if it has one, else of the host
    peak: int | None = None
    bound: int | None = None
    headroom: int | None = None  # of device or host, whichever has the smaller part left
    share: int | None = None  # headroom as permille
    rss: int | None = None
    owners: tuple[tuple[str, int], ...] = ()  # largest first
    growth: int | None = None
    grows: str = ""  # "device" or "host"
    left: int | None = None  # steps
    earliest: int | None = None
    latest: int | None = None

    @property
    def worry(self) -> tuple[int, float, float, int, int]:
        """Sorts the worst rank first."""
        return (
            _STATES.index(self.state),
            _or_infinity(self.left),
            _or_infinity(self.share),
            -(self.memory or 0),
            self.rank,
        )

    @property
    def level(self) -> str:
        """``bad``, ``warn`` or nothing."""
        if self.state == "ended":
            return ""
        if self.state in {"died", "failed"} or (self.share is not None and self.share < LITTLE):
            return "bad"
        grows_out = self.left is not None
        is_tight = self.share is not None and self.share < 2 * LITTLE
        return "warn" if self.state == "silent" or grows_out or is_tight else ""


def standing(ring: Ring) -> Standing:
    """One rank as its last row shows it."""
    who = ring.identity
    row = ring.rows[-1] if ring.rows else {}
    headrooms = [
        (row[f"{place}_headroom_permille"], row[f"{place}_headroom_bytes"])
        for place in ("device", "host")
        if {f"{place}_headroom_permille", f"{place}_headroom_bytes"} <= row.keys()
    ]
    share, headroom = min(headrooms, default=(None, None))
    growths = [
        (row[f"{place}_growth_bytes_per_step"], place)
        for place in ("device", "host")
        if f"{place}_growth_bytes_per_step" in row
    ]
    growth, grows = max(growths, default=(None, ""))
    owners = [(name, row[key]) for key, name in OWNERS.items() if row.get(key)]
    return Standing(
        who.rank,
        who.ranks,
        who.stage,
        who.stages,
        _line(who.role),
        _line(who.host),
        ring.state,
        _told(ring),
        _line((ring.closed or "").removeprefix(FAILED)) if ring.state == "failed" else "",
        row.get("step"),
        row.get("device_allocated_bytes"),
        row.get("device_reserved_bytes"),
        memory_of(row),
        _first(
            row,
            "device_allocated_top_bytes",
            "device_allocated_peak_bytes",
            "host_rss_top_bytes",
            "host_rss_peak_bytes",
        ),
        row.get("bound_bytes"),
        headroom,
        share,
        row.get("host_rss_bytes"),
        tuple(sorted(owners, key=lambda owner: -owner[1])),
        growth,
        grows,
        row.get("steps_left"),
        row.get("steps_left_earliest"),
        row.get("steps_left_latest"),
    )


def memory_of(row: dict[str, int]) -> int | None:
    """What a rank has of the device's memory, or of the host's where it has no device."""
    return _first(row, "device_reserved_bytes", "device_allocated_bytes", "host_rss_bytes")


def _line(text: str) -> str:
    """Without what a terminal would take for a command."""
    return plain(text).replace("\n", " ")


def _first(row: dict[str, int], *names: str) -> int | None:
    return next((row[name] for name in names if name in row), None)


def _or_infinity(value: int | None) -> float:
    return float("inf") if value is None else value


def _told(ring: Ring) -> str:
    if ring.state == "ended":
        return _line(ring.closed or "ended")
    if ring.state == "silent":
        return f"silent for {ring.age:,.0f} s"
    return ring.state if ring.rows or not ring.alive else "starting"


_KEYS: dict[str, Callable[[Standing], tuple[float, ...]]] = {
    "rank": lambda one: (one.rank,),
    "memory": lambda one: (-(one.memory or 0), one.rank),
    "headroom": lambda one: (_or_infinity(one.share), one.rank),
    "growth": lambda one: (-(one.growth or 0), one.rank),
}


def in_order(ranks: Iterable[Standing], sort: str, most: int) -> list[Standing]:
    """At most so many; by rank only if all of them fit, else the worst first."""
    known = list(ranks)
    if sort == "rank" and len(known) > most:
        return sorted(known, key=lambda one: one.worry)[:most]
    return sorted(known, key=_KEYS[sort])[:most]


def headline(ranks: Sequence[Standing]) -> str:
    """The rank that is worst, and why."""
    worst = min(ranks, key=lambda one: one.worry)
    place = [f"stage {worst.stage}"] if worst.stages > 1 else []
    name = f"rank {worst.rank} ({', '.join([*place, worst.host])})"
    step = "" if worst.step is None else f" after step {worst.step:,}"
    if worst.state == "died":
        why = f"{name} died{step}"
    elif worst.state == "failed":
        why = f"{name} failed{step} ({worst.why})"
    elif worst.state == "silent":
        why = f"{name} is {worst.told}{step}"
    elif worst.state == "running" and worst.left is not None:
        why = f"{name} will be out of memory in about {many(worst.left, 'step')}{_range(worst)}"
    elif worst.share is not None:
        why = f"{name} has the least headroom"
    elif worst.memory is not None:
        why = f"{name} has the most memory"
    else:
        return f"{name} is {worst.told}"
    facts = [
        f"memory {bytes_text(worst.memory)}" if worst.memory is not None else "",
        f"headroom {_headroom(worst)}" if worst.headroom is not None else "",
        f"growing {bytes_text(worst.growth)} a step{_where(worst)}"
        if worst.growth and worst.growth > 0
        else "",
    ]
    return f"{why}: {', '.join(fact for fact in facts if fact)}".rstrip(": ")


def _range(one: Standing) -> str:
    if one.earliest is None or one.latest is None:
        return "" if one.earliest is None else f" ({one.earliest:,} at the earliest)"
    return f" ({one.earliest:,} to {one.latest:,})"


def summary(ranks: Sequence[Standing]) -> str:
    """``4 ranks: 3 running, 1 died; step 118 to 121``."""
    states = Counter(one.state for one in ranks)
    told = [f"{states[state]:,} {state}" for state in ("running", *_STATES) if states[state]]
    world = max(one.ranks for one in ranks)
    count = (
        many(len(ranks), "rank") if len(ranks) >= world else f"{len(ranks):,} of {world:,} ranks"
    )
    steps = [one.step for one in ranks if one.step is not None]
    text = f"{count}: {', '.join(dict.fromkeys(told))}"
    if not steps:
        return text
    span = f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"
    return f"{text}; step {span}"


@dataclass(frozen=True)
class Column:
    """One column of the table, in a terminal and on the page."""

    title: str
    text: Callable[[Standing], str]
    number: bool = True
    dispensable: int = 0  # what goes first where there is little room; 0: never


def _size(value: int | None) -> str:
    return "" if value is None else bytes_text(value)


def _headroom(one: Standing) -> str:
    if one.headroom is None or one.share is None:
        return ""
    return f"{bytes_text(one.headroom)} ({one.share / 10:.1f} %)"


def _growth(one: Standing) -> str:
    if one.growth is None:
        return ""
    return f"{'+' if one.growth > 0 else ''}{bytes_text(one.growth)}{_where(one)}"


def _where(one: Standing) -> str:
    """Said where a rank has a device and it is not the device's memory that grows."""
    return " (host)" if one.grows == "host" and one.growth and one.allocated is not None else ""


def _owners(one: Standing) -> str:
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in one.owners[:2])


COLUMNS = (
    Column("rank", lambda one: f"{one.rank:,}"),
    Column("state", lambda one: one.told, number=False),
    Column("stage", lambda one: str(one.stage) if one.stages > 1 else "", dispensable=5),
    Column("role", lambda one: one.role, number=False, dispensable=9),
    Column("host", lambda one: one.host, number=False, dispensable=7),
    Column("step", lambda one: "" if one.step is None else f"{one.step:,}"),
    Column("allocated", lambda one: _size(one.allocated), dispensable=1),
    Column("reserved", lambda one: _size(one.reserved), dispensable=4),
    Column("peak", lambda one: _size(one.peak), dispensable=3),
    Column("bound", lambda one: _size(one.bound), dispensable=6),
    Column("headroom", _headroom),
    Column("growth/step", _growth),
    Column("host RSS", lambda one: _size(one.rss), dispensable=2),
    Column("largest owners", _owners, number=False, dispensable=8),
)
