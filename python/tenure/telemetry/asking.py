"""`tenure dump`: asks all ranks of a live job for their snapshots now."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tenure.errors import InputError
from tenure.inspect.files import whole
from tenure.telemetry.presence import FLIGHT, REQUEST, Presence, folder_of, is_alive, present_in

__all__ = ["Answers", "ask"]

_LOOK = 0.1  # seconds between two looks at the folder


@dataclass(frozen=True)
class Answers:
    """What came of a request.

    Attributes:
        files: The snapshots, by rank.
        missing: Ranks that have not written theirs.
    """

    files: list[Path]
    missing: list[int]


def ask(
    folder: str | Path, seconds: float, progress: Callable[[int, int], None] | None = None
) -> Answers:
    """Asks, and waits until all live ranks have answered or that time is over.

    Args:
        folder: The run's.
        seconds: To wait at most.
        progress: Called now and then with how many have answered, of how many.

    Raises:
        InputError: There is no live job.
    """
    folder = folder_of(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give the one that the job was started with")
    there = _may_answer(present_in(folder))
    if not there:
        raise InputError(f"{folder} has no live job: `tenure report` shows what earlier ones left")
    name = uuid.uuid4().hex
    told = {"id": name, "reason": "request", "text": "tenure dump", "time": time.time()}
    text = json.dumps(told)
    try:
        with whole(folder / REQUEST) as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"cannot ask in {folder}: {error.strerror}") from None
    try:
        return _collected(folder, there, name, time.monotonic() + seconds, progress)
    finally:
        if _text_of(folder / REQUEST) == text:
            (folder / REQUEST).unlink(missing_ok=True)


def _may_answer(present: list[Presence]) -> list[Presence]:
    """Less those that died here, and those elsewhere of which a later run has the place."""
    there = [(one, is_alive(one)) for one in present]
    there = [(one, alive) for one, alive in there if alive is not False]
    newest = max((one for one, _ in there), key=lambda one: one.began, default=None)
    began = {one.rank: one.began for one, _ in sorted(there, key=lambda pair: pair[0].began)}
    return [
        one
        for one, alive in there
        if alive
        or (one.began == began[one.rank] and newest is not None and one.rank < newest.ranks)
    ]


def _collected(
    folder: Path,
    there: list[Presence],
    name: str,
    deadline: float,
    progress: Callable[[int, int], None] | None,
) -> Answers:
    waiting = dict(enumerate(there))
    files: dict[int, Path] = {}
    seen: dict[int, int] = {}  # when each file was last written
    while waiting and time.monotonic() < deadline:
        for number, one in list(waiting.items()):
            path = one.file(folder, FLIGHT)
            when = path.stat().st_mtime_ns if path.exists() else 0
            if when != seen.get(number, 0):
                seen[number] = when
                if _answers(path, name):
                    files[number] = path
                    del waiting[number]
                    continue
            if is_alive(one) is False:
                del waiting[number]
        if progress is not None:
            progress(len(files), len(there))
        if waiting:
            time.sleep(_LOOK)
    missing = [one.rank for number, one in enumerate(there) if number not in files]
    return Answers([files[number] for number in sorted(files)], missing)


def _answers(path: Path, name: str) -> bool:
    try:
        found = json.loads(_text_of(path))
    except ValueError:
        return False
    return found.get("request") == name and "pending" not in found


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
