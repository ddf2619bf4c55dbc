"""A picture of all ranks: one line each, as full as it is coloured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from tenure.telemetry.figures import Figures, Row

__all__ = ["drawn"]

Picture = npt.NDArray[np.uint8]  # height × width × red, green, blue, alpha


@dataclass(frozen=True)
class _Column:
    key: str
    title: str


_COLUMNS = (
    _Column("device_allocated_bytes", "DEVICE USED"),
    _Column("device_reserved_bytes", "RESERVED"),
    _Column("device_headroom_permille", "DEVICE LEFT"),
    _Column("host_rss_bytes", "HOST RSS"),
    _Column("host_headroom_permille", "HOST LEFT"),
)

_TALLEST = 1024  # pixels of all ranks together: more ranks than that share a line
_TALL = 512  # as long as ranks have room in it
_CELL = 100  # pixels across
_GAP = 4
_LETTER = 8  # pixels across, at twice the size of the font below
_LINE = 14
_MARGIN = 6 * _LETTER

# Grey has 3.9 times the contrast of white and 5.3 of black: it reads on either page.
_INK = (128, 128, 128, 255)
_ABSENT = (128, 128, 128, 64)
# Dark blue to yellow, of even steps of lightness, also for those who do not see red and green.
_SCALE = np.array(
    [(68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37)],
    dtype=float,
)

# Three pixels by five, a row an octal digit.
_GLYPHS = """
    0 75557  1 26227  2 71747  3 71717  4 55711  5 74717  6 74757  7 71122  8 75757  9 75717
    A 25755  B 65656  C 34443  D 65556  E 74647  F 74644  G 34553  H 55755  I 72227  K 55655
    L 44447  M 57755  N 65555  O 25552  R 65655  S 34216  T 72222  U 55557  V 55552
    . 00002  - 00700  % 51245
""".split()  # noqa: SIM905  a table
_FONT = {" ": "00000", **dict(zip(_GLYPHS[::2], _GLYPHS[1::2], strict=True))}


def drawn(figures: Figures) -> Picture | None:
    """The ranks' rows as a picture; None for an interval that does not have them.

    A column for each headline figure that some rank has: its title, a cell for each rank, by rank
    from the top, and below it the worst figure and the rank that has it. Bytes are coloured from 0
    to the highest among the ranks; what is left from all to nothing. Above 1024 ranks, neighbours
    share a line, which shows the fullest of them. So the picture is never larger than 1,100 by 600.
    """
    columns = [c for c in _COLUMNS if any(c.key in row for row in figures.rows.values())]
    if not columns:
        return None
    ranks = sorted(figures.rows)
    group = -(-len(ranks) // _TALLEST)
    lines = -(-len(ranks) // group)
    thick = min(20, max(1, _TALL // lines))
    shape = (_LINE + lines * thick + 2 * _LINE + _GAP, _MARGIN + len(columns) * _CELL, 4)
    picture = np.zeros(shape, dtype=np.uint8)
    _number(picture, ranks[::group], thick)
    for place, column in enumerate(columns):
        left = _MARGIN + place * _CELL
        full = _fullness(column.key, [figures.rows[rank] for rank in ranks])
        cells = np.repeat(_colours(_fullest(full, group, lines)), thick, axis=0)
        if thick > 8:  # a line between ranks where there is room for one
            cells.reshape(lines, thick, 4)[:, -1] = 0
        picture[_LINE : _LINE + len(cells), left : left + _CELL - _GAP] = cells[:, None]
        _write(picture, 0, left, column.title)
        for number, text in enumerate(_worst(column.key, figures.rows)):
            _write(picture, _LINE + len(cells) + _GAP + number * _LINE, left, text)
    return picture


def _fullness(key: str, rows: list[Row]) -> npt.NDArray[np.float64]:
    """From 0 to 1; not a number where a rank does not have the figure."""
    values = np.array([row.get(key, np.nan) for row in rows], dtype=float)
    if key.endswith("permille"):
        return 1 - values / 1000
    highest = np.nanmax(values)
    return values / highest if highest > 0 else values


def _fullest(full: npt.NDArray[np.float64], group: int, lines: int) -> npt.NDArray[np.float64]:
    padded = np.full(group * lines, np.nan)
    padded[: len(full)] = full
    fullest: npt.NDArray[np.float64] = np.fmax.reduce(padded.reshape(lines, group), axis=1)
    return fullest


def _colours(full: npt.NDArray[np.float64]) -> Picture:
    at = np.linspace(0, 1, len(_SCALE))
    rgb = np.stack([np.interp(full, at, _SCALE[:, c]) for c in range(3)], axis=-1)
    absent = np.isnan(full)[:, None]
    opaque = np.concatenate([np.nan_to_num(rgb), np.full((len(full), 1), 255.0)], axis=-1)
    return np.where(absent, _ABSENT, np.round(opaque)).astype(np.uint8)


def _worst(key: str, rows: Mapping[int, Row]) -> tuple[str, str]:
    known = {rank: row[key] for rank, row in sorted(rows.items()) if key in row}
    if key.endswith("permille"):
        rank = min(known, key=lambda rank: known[rank])
        return f"{known[rank] / 10:.1f}%", f"RANK {rank}"
    rank = max(known, key=lambda rank: known[rank])
    return f"{known[rank] / 1e9:.2f} GB", f"RANK {rank}"


def _number(picture: Picture, ranks: list[int], thick: int) -> None:
    """Writes ranks in the margin, as many as there is room for."""
    every = -(-_LINE // thick)
    for line in range(0, len(ranks), every):
        _write(picture, _LINE + line * thick + max(0, (thick - 10) // 2), 0, str(ranks[line]))


def _write(picture: Picture, top: int, left: int, text: str) -> None:
    for place, letter in enumerate(text):
        spot = picture[top : top + 10, left + place * _LETTER :][:, :6]
        spot[_glyph(letter)[: len(spot), : spot.shape[1]]] = _INK


@cache
def _glyph(letter: str) -> npt.NDArray[np.bool_]:
    rows = [[int(c) >> 2 & 1, int(c) >> 1 & 1, int(c) & 1] for c in _FONT[letter]]
    return np.kron(np.array(rows), np.ones((2, 2))).astype(bool)
