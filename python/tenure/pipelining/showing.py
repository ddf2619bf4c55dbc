"""What `tenure pipeline show` does: a schedule by name or from a file, drawn in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

from tenure import _C
from tenure._inputs import need_text, parse_bytes
from tenure.errors import InputError
from tenure.inspect.files import whole
from tenure.pipelining.drawing import COLOURS, KINDS, Costs, Drawing, Row, svg
from tenure.pipelining.schedules import Schedule, Span, schedule

__all__ = ["Request", "draw", "print_text", "write"]

_RANKS = 4
_MICROBATCHES = 8
_MOST_RANKS = 1 << 14
_MOST = 1 << 23  # microbatches on stages: some GB while they are drawn


@dataclass(frozen=True)
class Request:
    """What is to be drawn: a schedule's name or its file, its sizes, and what things take."""

    schedule: str
    ranks: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    costs: Costs = field(default_factory=Costs)
    bytes: str = ""


def draw(request: Request) -> Drawing:
    """The drawing that is asked for.

    Raises:
        InputError: There is no such schedule, or it cannot have these sizes.
    """
    _check(request.costs)
    size = _microbatch_bytes(request.bytes) if request.bytes else None
    found = _schedule(request)
    if size is not None and size[0] * found.microbatches * found.stages >= 1 << 63:
        raise InputError(f"--bytes {request.bytes} for each microbatch is more than 2**63 bytes")
    return Drawing(found, request.costs, size)


def _check(costs: Costs) -> None:
    for name, cost in vars(costs).items():
        option = f"--{name.replace('_', '-')}"
        if name == "message" and cost == 0:
            continue
        if not 1e-6 <= cost <= 1e6:
            zero = "0 or " if name == "message" else ""
            raise InputError(f"{option} is {zero}a number from 0.000001 to 1000000, not {cost:g}")


def _microbatch_bytes(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) > 2:
        raise InputError(f"--bytes takes one size or two, as 120MiB,40MiB, not {len(parts)}")
    sizes = [parse_bytes(part) for part in parts]
    after, waiting = sizes[0], sizes[-1]
    if waiting > after:
        raise InputError(
            f"--bytes {text}: while its weights wait a microbatch takes a part of what it took "
            "after its forward, not more: write the larger size first"
        )
    return after, waiting


def _schedule(request: Request) -> Schedule:
    need_text(request.schedule, "--schedule")
    if request.schedule.lower().endswith(".csv"):
        return _from_csv(request)
    ranks = _RANKS if request.ranks is None else request.ranks
    microbatches = _MICROBATCHES if request.microbatches is None else request.microbatches
    chunks = request.chunks or 2
    if ranks > _MOST_RANKS or ranks * chunks * microbatches > _MOST:
        raise InputError(
            f"{ranks:,} ranks of {microbatches:,} microbatches are too many to draw: at most "
            f"{_MOST_RANKS:,} ranks, and ranks × stages of each × microbatches at most {_MOST:,}"
        )
    return schedule(request.schedule, ranks, microbatches, request.chunks)


def _from_csv(request: Request) -> Schedule:
    path = Path(request.schedule)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"cannot read {path}: it is no text") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    try:
        found = Schedule(_C.schedule_from_csv(text, path.stem))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if request.chunks is not None:
        raise InputError(f"--chunks is for schedules by name: {path} says which stages a rank has")
    for what, has, given in (
        ("ranks", found.ranks, request.ranks),
        ("microbatches", found.microbatches, request.microbatches),
    ):
        if given is not None and given != has:
            raise InputError(f"{path} has {has} {what}, not {given}: leave --{what} out")
    return found


def write(drawing: Drawing, request: Request, *, picture: str, table: str) -> list[Path]:
    """Writes the files that are asked for, each whole or not at all.

    Args:
        drawing: What :func:`draw` made.
        request: What it was made for, whose file is not replaced.
        picture: The SVG file; empty for none.
        table: The CSV file; empty for none.

    Raises:
        InputError: One of them cannot be written.
    """
    if picture and table and Path(picture).resolve() == Path(table).resolve():
        raise InputError(f"--svg and --csv are both {picture}: give two files")
    made = []
    makers: list[tuple[str, str, Callable[[], str]]] = [
        ("--svg", picture, lambda: svg(drawing)),
        ("--csv", table, drawing.schedule.csv),
    ]
    for option, out, make in makers:
        if not out:
            continue
        if Path(out).resolve() == Path(request.schedule).resolve():
            raise InputError(f"cannot write {out}: it is the schedule: give {option} another file")
        text = make()
        try:
            with whole(Path(out), "wb") as file:
                file.write(text.encode())
        except OSError as error:
            raise InputError(
                f"cannot write {out}: {error.strerror}: give {option} another file"
            ) from None
        made.append(Path(out))
    return made


def print_text(drawing: Drawing, console: Console | None = None) -> None:
    """Writes the drawing and its table, as wide as the terminal at most."""
    console = console or Console(highlight=False)
    for line in _lines(drawing, console.width):
        console.print(line, soft_wrap=True)


def _lines(drawing: Drawing, width: int) -> Iterator[Text]:
    yield Text(drawing.title, style="bold")
    yield Text()
    grid = _Grid(drawing, width)
    for rank in drawing.drawn:
        left_out = drawing.gap_before(rank)
        if left_out:
            yield Text(f"... {left_out:,} ranks ...", style="dim")
        yield grid.line(drawing.rows[rank])
    yield Text()
    yield from _legend(drawing)
    yield from grid.note()
    yield Text()
    yield from map(Text, _table(drawing))


class _Grid:
    """How time becomes columns: with numbers and gaps if there is room, with letters if not.

    What does not fit as letters either is cut, and then has its numbers.
    """

    def __init__(self, drawing: Drawing, width: int) -> None:
        self._drawing = drawing
        self._shortest = drawing.shortest
        self._label = len(f"rank {drawing.drawn[-1]}  ")
        self._room = max(width - self._label, 8)
        number = len(str(drawing.schedule.microbatches - 1))
        self._spaced, self._dense, self._letters = number + 2, number + 1, 1
        sizes = (self._spaced, self._dense, self._letters)
        fitting = [cell for cell in sizes if self._columns(cell) <= self._room]
        self._cut = not fitting
        self._cell = fitting[0] if fitting else self._spaced

    def _columns(self, cell: int) -> int:
        return math.ceil(round(self._drawing.length / self._shortest * cell, 6))

    def _column(self, time: float) -> int:
        # Rounded first: a sum of tenths may be just below the half that it is.
        return int(round(time / self._shortest * self._cell, 6) + 0.5)

    def line(self, row: Row) -> Text:
        line = Text(f"{f'rank {row.rank}':<{self._label}}")
        room = self._room - 1 if self._cut else self._room
        for span in self._drawing.spans(row.rank):
            begin, end = self._column(span.begin), min(self._column(span.end), room)
            if begin >= room:
                break
            line.append(" " * (self._label + begin - len(line)))
            self._append(line, span, end - begin, span.action.stage == row.stages[0])
        line.rstrip()
        if self._cut:
            line.append(" " * (self._label + room - len(line)) + ">", style="dim")
        return line

    def _append(self, line: Text, span: Span, width: int, first: bool) -> None:
        kind = span.action.kind
        letter = kind if first else kind.lower()
        label = f"{letter}{span.action.microbatch}"
        gap = " " if self._cell == self._spaced and width > len(label) else ""
        inside = width - len(gap)
        if inside < len(label) or self._cell == self._letters:
            label = letter[:inside]
        colour = COLOURS[kind][0 if first else 1]
        line.append(f"{label:-<{inside}}", style=Style(color="#000000", bgcolor=colour))
        line.append(gap)

    def note(self) -> Iterator[Text]:
        """What is not to be seen, and how it is."""
        if self._cut:
            until = self._room / self._cell * self._shortest
            what = f"cut at time {until:,.4g} of {self._drawing.length:,g}"
        elif self._cell == self._letters:
            what = "without the numbers of microbatches"
        else:
            return
        needed = self._columns(self._dense) + self._label
        yield Text(f"{what}: {needed:,} columns or --svg FILE show all", style="yellow")


def _legend(drawing: Drawing) -> Iterator[Text]:
    line = Text()
    for kind in drawing.kinds:
        line.append(kind, style=Style(color="#000000", bgcolor=COLOURS[kind][0]))
        line.append(f" {KINDS[kind]}  ")
    line.rstrip()
    yield line
    if drawing.has_later_stages:
        yield Text("lower case: not the rank's first stage")


def _table(drawing: Drawing) -> Iterator[str]:
    head = ["rank", "stages", "in flight", "weights wait"]
    sized = drawing.rows[0].bytes is not None
    head += ["bytes", "bubble"] if sized else ["bubble"]
    cells = [head]
    for rank in drawing.drawn:
        row = drawing.rows[rank]
        cells.append([str(rank), _stages(row.stages), *_figures(row, sized)])
    if len(drawing.drawn) < len(drawing.rows):
        cells += _summary(drawing.rows, sized)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        aligned = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
        yield "  ".join(aligned)


def _figures(row: Row, sized: bool) -> list[str]:
    size = [_C.bytes_text(row.bytes or 0)] if sized else []
    return [f"{row.in_flight:,}", f"{row.waiting:,}", *size, f"{row.bubble:.1%}"]


def _summary(rows: list[Row], sized: bool) -> Iterator[list[str]]:
    """The least and the most of each figure, over all ranks."""
    for word, pick in (("least", min), ("most", max)):
        figures = Row(
            rank=0,
            stages=[],
            in_flight=pick(row.in_flight for row in rows),
            waiting=pick(row.waiting for row in rows),
            bytes=pick(row.bytes or 0 for row in rows),
            bubble=pick(row.bubble for row in rows),
        )
        yield [word, "", *_figures(figures, sized)]


def _stages(stages: list[int]) -> str:
    if len(stages) <= 4:
        return ",".join(map(str, stages))
    return f"{stages[0]},{stages[1]}..{stages[-1]}"
