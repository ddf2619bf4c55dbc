"""`tenure report` of a job that died: what each rank left behind, and which of them began it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.errors import InputError
from tenure.inspect.files import whole
from tenure.inspect.runs import Head, by_run
from tenure.inspect.words import many, size
from tenure.telemetry.headline import headline, top_holder
from tenure.telemetry.presence import FLIGHT, LIVE, Presence, folder_of, is_alive
from tenure.telemetry.standing import OWNERS

if TYPE_CHECKING:
    from tenure.telemetry.rings import Ring

__all__ = ["Left", "find", "page", "screen", "title"]

_APART = 60.0  # seconds by which ranks of one run may begin apart, or end of one cause
_SKEW = 1.0  # seconds by which hosts' clocks may differ
_MOST_LINES = 64  # of ranks
_PAST = ("rank", "step", "time", "trace", "holders", "ledger")  # kept of what was survived
_PAGE = Path(__file__).parent / "page" / "flight.html"


@dataclass(frozen=True)
class Left:
    """What one rank left behind.

    Attributes:
        who: The rank.
        document: Its snapshot; empty: none.
        alive: Whether it still runs; None where that cannot be seen.
        present: Whether it never said that it left.
        sample: Its last sample, of its ring.
        sampled: When that was, in seconds since 1970.
        failure: Of what it ended, as its ring says; empty: of nothing, or it does not say.
    """

    who: Presence
    document: Mapping[str, Any] = field(default_factory=dict)
    alive: bool | None = None
    present: bool = False
    sample: Mapping[str, int] = field(default_factory=dict)
    sampled: float = 0.0
    failure: str = ""

    @property
    def reason(self) -> str:
        """Of its snapshot."""
        return str(self.document.get("headline", {}).get("reason", ""))

    @property
    def fatal(self) -> bool:
        """Whether the snapshot is about its own end."""
        return bool(self.document.get("headline", {}).get("fatal"))

    @property
    def earlier(self) -> Mapping[str, Any]:
        """What it survived before this snapshot, in brief; empty: nothing."""
        found: Mapping[str, Any] = self.document.get("earlier", {})
        return found if found.get("headline") else {}

    @property
    def speechless(self) -> bool:
        """Whether it is gone and has not said why."""
        return self.present and not self.alive and not self.fatal and self.reason != "told"

    @property
    def time(self) -> float:
        """When it was last heard of."""
        return max(float(self.document.get("time", 0.0)), self.sampled)

    @property
    def memory(self) -> int:
        """Bytes in its devices' allocators, or else resident."""
        devices = self.document.get("devices", [])
        on_devices = sum(one.get("allocated_bytes", 0) for one in devices)
        host = self.document.get("host_memory", {}).get("rss_bytes", 0)
        sampled = self.sample.get("device_allocated_bytes") or self.sample.get("host_rss_bytes", 0)
        return int(on_devices or host or sampled)


def find(paths: Iterable[str | Path]) -> list[Left]:
    """What ranks of the latest run in these folders left, if one of them wrote a snapshot or died.

    The rank that everything began with comes first. A file that cannot be read does not hide the
    others: its rank has no snapshot.
    """
    left: dict[tuple[Path, str], Left] = {}
    for path in map(folder_of, paths):
        if not path.is_dir():
            continue
        rings = _rings(path)
        for file in sorted([*path.glob(f"*{LIVE}"), *path.glob(f"*{FLIGHT}")]):
            told = _told(file)
            if told is None:
                continue
            who, document = told
            ring = rings.get(who.rank)
            if ring and ring.path.stem != who.stem:
                if ring.identity.started / 1e9 > who.began:
                    continue  # it was started again since, and has nothing to say of that
                ring = None
            key = path, who.stem
            before = left.get(key, Left(who, alive=is_alive(who)))
            is_live = file.name.endswith(LIVE)
            told_by = Left(
                who,
                before.document if is_live else document,
                before.alive,
                before.present or is_live,
            )
            left[key] = _with_ring(told_by, ring) if ring else told_by
        job = next((one.who.job for (place, _), one in left.items() if place == path), "")
        for ring in rings.values():
            if ring.state in ("failed", "died") and (path, ring.path.stem) not in left:
                alone = Left(_owner_of(ring, job), alive=False, present=True)
                left[path, ring.path.stem] = _with_ring(alone, ring)
    run = _latest(left)
    # Of a rank on another host only what happened to others tells whether it still runs.
    ended = any(one.fatal for one in run)
    run = [one if one.alive is not None else replace(one, alive=not ended) for one in run]
    run = [_ended_short(one) if _failed_others(one, run) else one for one in run]
    run = [_gone_on(one) if _has_gone_on(one, run) else one for one in run]
    run = [_by_its_ring(one) if one.failure and not one.document else one for one in run]
    if not any(one.document or one.speechless for one in run):
        return []
    return sorted(run, key=_precedence)


def title(left: list[Left]) -> str:
    """What happened, in a sentence without its full stop."""
    first = left[0]
    if first.speechless:
        return _without_a_word(first, left)
    if first.reason == "request":
        ranks = many(sum(bool(one.document) for one in left), "rank")
        first = max(left, key=lambda one: one.memory)
        most = f"rank {first.who.rank} has most memory, {size(first.memory)}"
        return f"{_survived(left[0])}snapshots of {ranks}; {most}"
    return headline(first.document)


def screen(left: list[Left]) -> str:
    """The first screen: the rank it began with, what failed, what held the memory; then all."""
    first = left[0]
    lines = [title(left)]
    held = top_holder(first.earlier) or _held(first)
    lines += [f"  {held}"] if held else []
    lines += [f"  at {first.document['trace'][-1]}"] if first.document.get("trace") else []
    if first.reason == "memory" and first.document["headline"].get("text"):
        lines.append(f"  {first.document['headline']['text']}")
    lines += ["", *_table(left)]
    return "\n".join(lines)


def page(left: list[Left], out: str | Path, name: str) -> Path:
    """Writes the same, with all that the snapshots hold, as one page that needs nothing else."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["size"] = size
    rows = [
        {"left": one, "ending": _ending(one), "held": _held(one), "past": _past(one)}
        for one in left
    ]
    text = environment.from_string(_PAGE.read_text()).render(
        title=title(left), name=name, rows=rows
    )
    try:
        with whole(Path(out)) as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}: give --out another file") from None
    return Path(out)


def _told(file: Path) -> tuple[Presence, dict[str, Any]] | None:
    try:
        document = json.loads(file.read_text())
        return Presence.of(document), document
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rings(folder: Path) -> dict[int, Ring]:
    """By rank, the newest ring, with its last row."""
    from tenure.telemetry.rings import rings_of

    return {ring.identity.rank: ring for ring in rings_of(folder, last=1)}


def _latest(left: Mapping[tuple[Path, str], Left]) -> list[Left]:
    heads = []
    by_file: dict[Path, Left] = {}
    for (folder, stem), one in left.items():
        path = folder / stem
        by_file[path] = one
        meta = {"rank": str(one.who.rank), "job": one.who.job}
        end = max(one.who.began, one.time) + _APART
        heads.append(Head(path, meta, one.who.began, end))
    runs = by_run(heads)
    latest = [by_file[head.path] for head in runs[-1]] if runs else []
    by_rank = {one.who.rank: one for one in sorted(latest, key=lambda one: one.who.began)}
    return list(by_rank.values())


def _failed_others(one: Left, run: list[Left]) -> bool:
    """Whether the program caught this shortage and then ended by itself, which others failed of."""
    if one.reason != "memory" or one.fatal or one.alive:
        return False
    ends = [float(other.document["time"]) for other in run if other.fatal]
    return bool(ends) and -_SKEW <= min(ends) - float(one.document["time"]) <= _APART


def _ended_short(one: Left) -> Left:
    told = {**one.document["headline"], "fatal": True}
    return replace(one, document={**one.document, "headline": told})


def _with_ring(one: Left, ring: Ring) -> Left:
    from tenure.telemetry.rings import FAILED

    sample = ring.rows[-1] if ring.rows else {}
    told = ring.closed or ""
    failure = told.removeprefix(FAILED) if told.startswith(FAILED) else ""
    return replace(one, sample=sample, sampled=sample.get("when", 0) / 1e9, failure=failure)


def _owner_of(ring: Ring, job: str) -> Presence:
    """Who wrote a ring and nothing else."""
    who = ring.identity
    started = int(who.process_start) if who.process_start.isdigit() else 0
    return Presence(
        *(who.host, who.rank, who.ranks, who.stage, who.stages, who.pid, who.attempt),
        *(who.started / 1e9, started, job, who.machine),
    )


def _has_gone_on(one: Left, run: list[Left]) -> bool:
    """Whether steps ended after what its snapshot is of, on this rank and where it happened."""
    if not one.document or one.reason == "request" or one.sampled <= one.document["time"]:
        return False
    if one.reason != "told":
        return one.fatal
    after = one.document.get("after", {})
    return any(
        other.who.rank == after.get("rank") and other.sampled > after.get("time", 0.0)
        for other in run
    )


def _gone_on(one: Left) -> Left:
    """What its snapshot is of is past: it ended otherwise, if it did."""
    if one.reason == "told":
        return replace(one, document={})
    failed = {**one.document["headline"], "fatal": False}
    if one.failure or (one.present and not one.alive):
        past = {name: one.document[name] for name in _PAST if name in one.document}
        return _by_its_ring(replace(one, document={"earlier": {**past, "headline": failed}}))
    return replace(one, document={**one.document, "headline": failed})


def _by_its_ring(one: Left) -> Left:
    """That it failed, where it could write no snapshot of that."""
    if not one.failure:
        return one
    told = {"reason": "exception", "text": one.failure, "fatal": True}
    known = {"rank": one.who.rank, "step": one.sample.get("step"), "time": one.sampled}
    return replace(one, document={**one.document, **known, "headline": told})


def _survived(one: Left) -> str:
    return f"{_went_on(one)}; since then " if one.earlier else ""


def _went_on(one: Left) -> str:
    told = {**one.earlier["headline"], "fatal": False}
    return headline({**one.earlier, "headline": told})


def _past(one: Left) -> str:
    return "; ".join(filter(None, [_went_on(one), top_holder(one.earlier)])) if one.earlier else ""


def _precedence(one: Left) -> tuple[int, float, int]:
    """Who is told of first: who ran out, who was killed, who failed of itself; then by rank."""
    follows = "after" in one.document
    if one.reason == "memory" and one.fatal:
        return (1 if follows else 0), one.time, one.who.rank
    if one.speechless:
        return 2, one.time, one.who.rank
    if one.fatal:
        return (4 if follows else 3), one.time, one.who.rank
    if one.reason in ("memory", "exception", "signal"):
        return 5, one.time, one.who.rank
    if one.reason == "request" and one.earlier:
        return 5, float(one.earlier["time"]), one.who.rank
    if one.reason == "request":
        return 6, -one.memory, one.who.rank
    return 7, 0.0, one.who.rank


def _held(one: Left) -> str:
    """What held most memory, as its snapshot knows, or else its last sample."""
    if one.document:
        return top_holder(one.document)
    owners = [(one.sample[key], name) for key, name in OWNERS.items() if one.sample.get(key)]
    most, owner = max(owners, default=(0, ""))
    grown = max(one.sample.get(f"{where}_growth_bytes_per_step", 0) for where in ("device", "host"))
    told = [
        f"{owner} held {size(most)}, the most of all owners" if owner else "",
        f"memory grew by {size(grown)} a step" if "steps_left" in one.sample else "",
    ]
    return "; ".join(filter(None, told))


def _without_a_word(first: Left, left: list[Left]) -> str:
    text = f"rank {first.who.rank} left no word: it was killed, or ended at once"
    if not first.sampled:
        return f"{text}, as by the kernel when memory runs out"
    stopped = max((one.time for one in left if one is not first and one.document), default=0.0)
    before = f", {stopped - first.sampled:.1f} s before the others stopped" if stopped else ""
    figures = [
        f"{size(first.sample[name])} {words}"
        for name, words in (
            ("device_allocated_bytes", "on its device"),
            ("device_headroom_bytes", "left there"),
            ("host_rss_bytes", "resident"),
            ("host_headroom_bytes", "left on the host"),
        )
        if name in first.sample
    ]
    at = f"step {first.sample['step']:,}" if "step" in first.sample else "no step"
    return f"{text}; its last sample ({at}{before}): {', '.join(figures)}"


def _table(left: list[Left]) -> list[str]:
    lines = [f"{'rank':>6} {'stage':>5} {'step':>8} {'memory':>14}  end"]
    for one in left[:_MOST_LINES]:
        step = one.document.get("step") or one.sample.get("step") or ""
        memory = size(one.memory) if one.memory else ""
        shown = f"{one.who.rank:>6} {one.who.stage:>5} {step:>8} {memory:>14}"
        lines.append(f"{shown}  {_ending(one)}")
    if len(left) > _MOST_LINES:
        lines.append(f"   … and {many(len(left) - _MOST_LINES, 'more rank')}")
    missing = sorted(set(range(left[0].who.ranks)) - {one.who.rank for one in left})
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        lines.append(f"left nothing, having ended before or never begun: rank {shown}")
    times = [one.time for one in left if one.time]
    if times:
        lines.append(f"last heard of at {datetime.fromtimestamp(max(times)):%Y-%m-%d %H:%M:%S}")
    return lines


def _ending(one: Left) -> str:
    if one.speechless:
        return "left no word"
    if not one.document:
        return "still running" if one.alive else "no snapshot" if one.present else "ended"
    told = one.document["headline"]
    text = told.get("text", "")
    kind = "" if one.document.get("whole") else " (a row)"
    if one.reason == "memory":
        end = "ran out of memory" if one.fatal else "ran out of memory, and went on"
    elif one.reason == "told":
        end = f"stopped after {text}" if text else "stopped after another rank"
    elif one.reason == "request":
        end = f"asked: {text}"
    elif one.document.get("whole") is None:
        end, kind = text, ""  # as the ring tells
    else:
        end = text if one.fatal else f"{text}, and went on"
    if one.earlier:
        step, told = one.earlier.get("step"), one.earlier["headline"]
        what = "ran out of memory" if told.get("reason") == "memory" else told.get("text", "failed")
        end = f"{what}{f' at step {step:,}' if step else ''}, and went on; {end}"
    end = end if len(end) <= 80 else end[:79] + "…"
    return f"{end}{kind}"
