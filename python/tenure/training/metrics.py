"""What a run writes while it goes: a line of JSON for each thing that happens, and a log."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

from tenure.inspect.files import whole
from tenure.inspect.words import plain

__all__ = ["Log", "Metrics"]


class Metrics:
    """`metrics.jsonl`. Each line has ``event`` and ``step``; lines are there when they are said.

    Events are ``step``, ``evaluation``, ``sample`` and ``checkpoint``.
    """

    def __init__(self, path: Path) -> None:
        """Makes the file unless it is there."""
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")

    def go_on_from(self, step: int) -> None:
        """Drops what is known of later steps: they are done again."""
        self._file.close()
        kept = [line for line in _lines(self._path) if 0 < _step(line) <= step]
        with whole(self._path) as file:
            file.writelines(kept)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, event: str, step: int, **told: Any) -> None:
        """Adds a line."""
        known = {key: value for key, value in told.items() if _is_json(value)}
        record = {"event": event, "step": step, "time": round(time.time(), 3), **known}
        print(json.dumps(record, ensure_ascii=False), file=self._file, flush=True)

    def close(self) -> None:
        """Ends it."""
        self._file.close()


class Log:
    """`train.log`: what happened, for a person, with times."""

    def __init__(self, path: Path) -> None:
        """Opened for each line: after a rank has died another process goes on with it."""
        self._path = path

    def __call__(self, text: str) -> None:
        """Adds a line, or several of one time."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{now}  {line}\n" for line in plain(text).splitlines())


def _is_json(value: object) -> bool:
    """JSON has no NaN: a figure that is none is left out."""
    return not isinstance(value, float) or math.isfinite(value)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def _step(line: str) -> int:
    """Of a line; 0 for one that a rank was killed in the middle of."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
