"""A line of JSON an interval, in a file that any program reads."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from tenure.errors import InputError
from tenure.telemetry.figures import Figure, Figures
from tenure.telemetry.sinks.sink import Names, need_folder

__all__ = ["JsonLines", "record"]


class JsonLines:
    """Adds a line to a file for each interval. It is whole, and there, when `write` returns."""

    name = "jsonl"

    def __init__(self, path: str | os.PathLike[str], *, names: Names | None = None) -> None:
        """Takes the file, made unless it is there.

        Args:
            path: The file.
            names: What a line has besides ``step`` and ``time``; None for all that is known,
                see `record`.

        Raises:
            InputError: For a file that cannot be written to.
        """
        self._path = Path(path)
        self._names = names
        self._file: FileIO | None = None
        self._is_torn = False
        need_folder(self._path.parent, f"the sink {self.name}")
        try:
            self._path.open("ab").close()
        except OSError as error:
            raise InputError(
                f"the sink {self.name} cannot write to {self._path} ({error.strerror}): "
                "give it another file"
            ) from None

    def open(self) -> None:
        """Opens the file; what a killed process left there as half a line stays one by itself."""
        self._file = self._path.open("a+b", buffering=0)
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._is_torn = self._file.read(1) != b"\n"

    def write(self, figures: Figures) -> None:
        """Adds the line."""
        if self._file is None:
            raise ValueError("written to before it was opened")
        told = record(figures) if self._names is None else self._named(figures, self._names)
        line = json.dumps(told, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line
        # Without a buffer, which would keep what a full disk refused and try it again for ever.
        written = self._file.write(line)
        self._is_torn = 0 < written < len(line)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def _named(figures: Figures, names: Names) -> dict[str, int | float]:
        return {"step": figures.step, "time": round(figures.time, 3), **names(figures)}


def record(figures: Figures) -> dict[str, Any]:
    """All that an interval knows, as JSON has it.

    ``world`` and ``stages`` have ``{"value": …, "rank": …}`` for each key; ``peak_row`` and, where
    the interval has them, ``rows`` have plain figures.
    """
    told: dict[str, Any] = {
        "step": figures.step,
        "time": round(figures.time, 3),
        "rank": figures.rank,
        "ranks": figures.ranks,
        "world": _told(figures.world),
        "stages": {stage: _told(found) for stage, found in figures.stages.items()},
        "peak_rank": figures.peak_rank,
        "peak_row": dict(figures.peak_row),
        "alerts": list(figures.alerts),
        "dropped": figures.dropped,
    }
    if figures.rows:
        told["rows"] = {rank: dict(row) for rank, row in figures.rows.items()}
    return told


def _told(found: Mapping[str, Figure]) -> dict[str, dict[str, int]]:
    return {key: {"value": figure.value, "rank": figure.rank} for key, figure in found.items()}
