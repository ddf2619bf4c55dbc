"""A schedule as a picture: what is drawn of it, and the same as SVG."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from tenure import _C
from tenure.errors import InputError
from tenure.inspect.words import plain
from tenure.pipelining.schedules import Action, Schedule, Span

__all__ = ["COLOURS", "KINDS", "Costs", "Drawing", "Row", "svg"]

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}

# Okabe and Ito's, which the colour-blind tell apart: for a rank's first stage, and for its others.
COLOURS = {
    "F": ("#56b4e9", "#b3ddf5"),
    "B": ("#009e73", "#86d1ba"),
    "I": ("#e69f00", "#f5d488"),
    "W": ("#cc79a7", "#e9c3d8"),
}

_ALL_RANKS = 32  # of so many each is drawn
_ENDS = 4  # of more than that so many at each end


@dataclass(frozen=True)
class Costs:
    """What actions take, in any unit; a whole backward takes as long as its halves."""

    forward: float = 1
    input_backward: float = 1
    weight_backward: float = 1
    message: float = 0


@dataclass(frozen=True)
class Row:
    """What one rank comes to."""

    rank: int
    stages: list[int]
    in_flight: int
    waiting: int
    bytes: int | None
    bubble: float


class Drawing:
    """A schedule, what follows from it for each rank, and when the actions of some ranks run.

    Of many ranks the first and the last few are drawn.

    Example:
        >>> from tenure.pipelining import drawing, schedule
        >>> picture = drawing.Drawing(schedule("1f1b", ranks=2, microbatches=3))
        >>> picture.rows[0].in_flight, picture.length
        (2, 12.0)
        >>> [str(span.action) for span in picture.spans(1)]
        ['1F0', '1B0', '1F1', '1B1', '1F2', '1B2']
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs | None = None,
        bytes: tuple[int, int] | None = None,  # noqa: A002
    ) -> None:
        """Finds what follows from a schedule.

        Args:
            schedule: What is drawn.
            costs: What its actions take.
            bytes: What a microbatch takes on a stage after its forward, and while its weights wait.
        """
        self.schedule = schedule
        self.drawn = _drawn(schedule.ranks)
        costs = costs or Costs()
        spans, bubbles, length = schedule.data.timeline(
            costs.forward, costs.input_backward, costs.weight_backward, costs.message, self.drawn
        )
        self.length: float = length
        self._times = dict(zip(self.drawn, spans, strict=True))
        self.rows = list(_rows(schedule, bubbles, bytes))

    @property
    def title(self) -> str:
        """The schedule in one line."""
        one = self.schedule
        stages = f"{one.stages:,} stages, " if one.stages != one.ranks else ""
        return plain(
            f"{one.name}: {_many(one.ranks, 'rank')}, {stages}"
            f"{_many(one.microbatches, 'microbatch', 'es')}, time {self.length:,g}"
        )

    @property
    def shortest(self) -> float:
        """What the shortest action that is drawn takes."""
        return min(end - begin for row in self._times.values() for begin, end in row)

    @property
    def kinds(self) -> list[str]:
        """Those that the drawn ranks have."""
        there = {kind for rank in self.drawn for _, kind, _ in self.schedule.data.actions(rank)}
        return [kind for kind in KINDS if kind in there]

    @property
    def has_later_stages(self) -> bool:
        """Whether a rank has more than one stage."""
        return any(len(row.stages) > 1 for row in self.rows)

    @property
    def size(self) -> int:
        """How many actions are drawn."""
        return sum(map(len, self._times.values()))

    def spans(self, rank: int) -> Iterator[Span]:
        """When each action of a rank that is drawn runs."""
        for action, times in zip(self.schedule.data.actions(rank), self._times[rank], strict=True):
            yield Span(Action(*action), *times)

    def gap_before(self, rank: int) -> int:
        """How many ranks are left out before one that is drawn."""
        place = self.drawn.index(rank)
        return rank - self.drawn[place - 1] - 1 if place else 0


def _drawn(ranks: int) -> list[int]:
    if ranks <= _ALL_RANKS:
        return list(range(ranks))
    return [*range(_ENDS), *range(ranks - _ENDS, ranks)]


def _rows(schedule: Schedule, bubbles: list[float], one: tuple[int, int] | None) -> Iterator[Row]:
    stages = defaultdict(list)
    for stage, rank in enumerate(schedule.rank_of_stage):
        stages[rank].append(stage)
    for rank, bubble in enumerate(bubbles):
        bound = schedule.bound(rank)
        size = None if one is None else schedule.peak_bytes(rank, [one] * len(stages[rank]))
        yield Row(rank, stages[rank], bound.in_flight, bound.waiting, size, bubble)


def _many(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{plural if count != 1 else ''}"


# Pixels.
_EDGE = 12
_TOP = 72
_ROW = 26
_CELL = 26  # of the shortest action, unless the picture becomes too wide
_LEAST_CELL = 2
_WIDEST = 6000
_LETTER = 7.3  # of the widest of the fonts

_MOST_ACTIONS = 200_000  # more than viewers open

_STYLE = """
svg { background: #fff }
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24 }
.title { font-size: 15px; font-weight: bold }
.faint { fill: #59636e }
.idle { fill: #eceff2 }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117 }
  text { fill: #e6edf3 }
  .faint { fill: #9198a1 }
  .idle { fill: #1c222a }
}
text.in { fill: #000; text-anchor: middle; pointer-events: none }
"""


def svg(drawing: Drawing) -> str:
    """The drawing as a file that needs nothing else: a rectangle an action.

    Raises:
        InputError: It has more actions than viewers open.
    """
    if drawing.size > _MOST_ACTIONS:
        raise InputError(
            f"a picture of {drawing.size:,} actions is more than viewers open, which is "
            f"{_MOST_ACTIONS:,}: draw fewer microbatches"
        )
    return "\n".join(_Page(drawing).lines()) + "\n"


class _Page:
    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        units = drawing.length / drawing.shortest
        self._scale = min(_CELL, max(_LEAST_CELL, _WIDEST / units)) / drawing.shortest
        self._left = 2 * _EDGE + _width(f"rank {drawing.drawn[-1]}")
        self._right = self._left + drawing.length * self._scale

    def lines(self) -> Iterator[str]:
        drawing = self._drawing
        title = drawing.title
        legend = list(self._legend())
        ends = max(_width(_summary(drawing.rows[rank])) for rank in drawing.drawn)
        widest = max(self._right + _EDGE + ends, legend[-1].end, _EDGE + 1.25 * _width(title))
        width = math.ceil(widest + _EDGE)
        left_out = sum(1 for rank in drawing.drawn if drawing.gap_before(rank))
        height = _TOP + (len(drawing.drawn) + left_out + 1) * _ROW + _EDGE
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">'
        )
        yield f"<title>{escape(title)}</title>"
        yield f"<style>{_STYLE}{_colours()}</style>"
        yield f'<text class="title" x="{_EDGE}" y="24">{escape(title)}</text>'
        yield from (entry.text for entry in legend)
        yield from self._rows()
        yield "</svg>"

    def _legend(self) -> Iterator[_Entry]:
        # Paths, so that each rectangle is an action.
        x: float = _EDGE
        for kind in self._drawing.kinds:
            shades = [kind, kind.lower()] if self._drawing.has_later_stages else [kind]
            swatches = ""
            for shade in shades:
                swatches += f'<path class="{shade}" d="M{x:.0f} 40h16v16h-16z"/>'
                x += 18
            label = f"{kind} {KINDS[kind]}"
            text = f'{swatches}<text x="{x + 4:.0f}" y="52">{label}</text>'
            x += 4 + _width(label)
            yield _Entry(text, x)
            x += 2 * _EDGE
        if self._drawing.has_later_stages:
            label = "pale: not the rank's first stage"
            text = f'<text class="faint" x="{x:.0f}" y="52">{label}</text>'
            yield _Entry(text, x + _width(label))

    def _rows(self) -> Iterator[str]:
        y = _TOP
        for rank in self._drawing.drawn:
            left_out = self._drawing.gap_before(rank)
            if left_out:
                yield self._aside(y, f"… {left_out:,} ranks …")
                y += _ROW
            yield from self._row(self._drawing.rows[rank], y)
            y += _ROW
        yield self._aside(y, "time →")

    def _aside(self, y: int, text: str) -> str:
        return f'<text class="faint" x="{self._left:.0f}" y="{y + 17}">{text}</text>'

    def _row(self, row: Row, y: int) -> Iterator[str]:
        left, right = self._left, self._right
        yield f'<text x="{_EDGE}" y="{y + 17}">rank {row.rank}</text>'
        yield f'<path class="idle" d="M{left:.2f} {y + 2}H{right:.2f}v{_ROW - 4}H{left:.2f}z"/>'
        for span in self._drawing.spans(row.rank):
            yield from self._cell(span, y, row.stages[0])
        yield f'<text x="{right + _EDGE:.0f}" y="{y + 17}">{_summary(row)}</text>'

    def _cell(self, span: Span, y: int, first_stage: int) -> Iterator[str]:
        action = span.action
        shade = action.kind if action.stage == first_stage else action.kind.lower()
        x = self._left + span.begin * self._scale
        width = (span.end - span.begin) * self._scale
        width -= 1 if width > 4 else 0
        yield (
            f'<rect class="{shade}" x="{x:.2f}" y="{y + 2}" width="{width:.2f}" '
            f'height="{_ROW - 4}"><title>stage {action.stage}, {KINDS[action.kind]} of microbatch '
            f"{action.microbatch}, {span.begin:g} to {span.end:g}</title></rect>"
        )
        number = str(action.microbatch)
        for label in (action.kind + number, number):
            if _width(label) + 2 <= width:
                yield f'<text class="in" x="{x + width / 2:.2f}" y="{y + 17}">{label}</text>'
                return


@dataclass(frozen=True)
class _Entry:
    """A part of the legend, and where it ends."""

    text: str
    end: float


def _colours() -> str:
    return "".join(
        f".{kind} {{ fill: {first} }} .{kind.lower()} {{ fill: {other} }}\n"
        for kind, (first, other) in COLOURS.items()
    )


def _summary(row: Row) -> str:
    waiting = f" ({row.waiting:,} waiting for weights)" if row.waiting else ""
    size = f", {_C.bytes_text(row.bytes)}" if row.bytes is not None else ""
    return f"bubble {row.bubble:.1%}, {row.in_flight:,} in flight{waiting}{size}"


def _width(text: str) -> float:
    return _LETTER * len(text)
