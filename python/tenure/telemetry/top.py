"""`tenure top`: the ranks of a run in a terminal, from their rings. Imports no torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tenure.inspect.verdicts import shown_path
from tenure.inspect.words import many, plain
from tenure.telemetry.rings import Rings
from tenure.telemetry.standing import (
    COLUMNS,
    Column,
    Standing,
    headline,
    in_order,
    standing,
    summary,
)

__all__ = ["Request", "frame", "run"]

ROWS_ELSEWHERE = 100  # where there is no terminal to fit into
_AROUND = 4  # lines below the headline that are no rank: summary, titles, "and more", the cursor's
_GAP = 2
_WIDE = 1000  # where there is no terminal nothing is cut
_STYLES = {"bad": "bold red", "warn": "yellow", "": ""}


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    folder: str
    sort: str = "rank"
    every: float = 1.0
    once: bool = False
    rows: int | None = None


def run(request: Request, console: Console | None = None) -> int:
    """Shows the table until Ctrl-C, or once; returns the exit status."""
    console = console or _console()
    rings = Rings.of_run(request.folder)
    if request.once or not console.is_terminal:
        console.print(_look(rings, request, console))
        return 0
    shown: RenderableType = _look(rings, request, console)
    try:
        with (
            _ended_by_sigterm(),
            Live(shown, console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                live.update(shown, refresh=True)
                time.sleep(request.every)
                shown = _look(rings, request, console)
    except KeyboardInterrupt:
        console.print(shown)  # the screen that it was on is gone
        return 0


def _console() -> Console:
    """One as wide and high as the terminal is now, whatever COLUMNS and LINES once were."""
    size = {"COLUMNS", "LINES"}
    live = {name: value for name, value in os.environ.items() if name not in size}
    console = Console(highlight=False, _environ=live)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """As Ctrl-C does, so that the terminal gets its cursor and its screen back."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _look(rings: Rings, request: Request, console: Console) -> RenderableType:
    ranks = [standing(ring) for ring in rings.look(last=2)]
    below = [Text(left_out(rings.broken.values()), style="yellow")] if rings.broken else []
    if not ranks:
        return Group(Text(waiting(request.folder)), *below)
    if not console.is_terminal:
        return Group(frame(ranks, request.sort, request.rows or ROWS_ELSEWHERE), *below)
    width = console.width
    texts = [Text(headline(ranks)), *below]
    fits = console.height - _AROUND - sum(len(text.wrap(console, width)) for text in texts)
    return Group(frame(ranks, request.sort, max(1, request.rows or fits), width), *below)


def waiting(folder: str) -> str:
    """What is said before there is anything to show."""
    return f"no rank has written to {shown_path(folder)} yet: waiting for a tenure.Monitor there"


def left_out(reasons: Iterable[str]) -> str:
    """What is said of files that cannot be read."""
    known = list(reasons)
    others = f", and {many(len(known) - 1, 'other file')}" if len(known) > 1 else ""
    return plain(f"left out: {known[0]}{others}").replace("\n", " ")


def frame(
    ranks: Sequence[Standing], sort: str, most: int, width: int | None = None
) -> RenderableType:
    """The culprit, the table, and how many ranks are not in it.

    Args:
        ranks: At least one.
        sort: One of `tenure.telemetry.standing.SORTS`.
        most: Rows.
        width: Of the terminal; columns that matter less are left out to fit. None: all of them.
    """
    shown = in_order(ranks, sort, most)
    cells = [
        (column, texts)
        for column in COLUMNS
        if any(texts := [column.text(one) for one in shown])  # what no rank tells has no column
    ]
    if width is not None:
        cells = _fitting(cells, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column, _ in cells:
        table.add_column(column.title, justify="right" if column.number else "left", no_wrap=True)
    for at, one in enumerate(shown):
        table.add_row(*(Text(texts[at]) for _, texts in cells), style=_STYLES[one.level])
    worst = min(ranks, key=lambda one: one.worry)
    parts: list[RenderableType] = [
        Text(headline(ranks), style=_STYLES[worst.level] or "bold"),
        Text(summary(ranks), style="dim", no_wrap=True),
        table,
    ]
    if len(ranks) > len(shown):
        parts.append(Text(more(len(shown), len(ranks), sort), style="dim"))
    return Group(*parts)


def more(shown: int, of: int, sort: str) -> str:
    """What is said of ranks that are not shown."""
    by = "the worst first" if sort == "rank" else f"by {sort}"
    return f"and {of - shown:,} more ({by})"


def _fitting(cells: list[tuple[Column, list[str]]], width: int) -> list[tuple[Column, list[str]]]:
    """Without the columns that matter least, until the others fit."""

    def needs(kept: list[tuple[Column, list[str]]]) -> int:
        return sum(max(map(len, [column.title, *texts])) + _GAP for column, texts in kept) - _GAP

    kept = cells
    while needs(kept) > width:
        least = max(kept, key=lambda cell: cell[0].dispensable)
        if not least[0].dispensable:
            break
        kept = [cell for cell in kept if cell is not least]
    return kept
