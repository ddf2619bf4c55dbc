"""`tenure export`: recordings for other tools to read."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tenure.errors import InputError
from tenure.inspect import recordings
from tenure.inspect.files import whole
from tenure.report.lives import Life, Recorded, opened
from tenure.report.snapshot import snapshot_of

__all__ = ["FORMATS", "export"]

_COLUMNS = [
    *("rank", "storage", "bytes", "device", "op", "module", "phase", "site", "forward_site"),
    *("kind", "name"),
    *("born_step", "died_step", "born_seconds", "died_seconds"),
]
_COUNTERS = ("held", "peak", "rss", "device_allocated", "device_reserved")


def export(paths: recordings.Meant, form: str, out: str | Path, rank: int | None) -> list[Path]:
    """Writes recordings in another form.

    Args:
        paths: Folders and files, or what :func:`tenure.inspect.recordings.find` found.
        form: One of FORMATS.
        out: The file to write; with CSV the folder.
        rank: Which one, where only one can be shown; default: the lowest.

    Returns:
        The files that were written.
    """
    found = recordings.find(paths)
    files = found.files
    if rank is not None:
        files = [file for file in files if _rank_of(file) == rank]
        if not files:
            folders = sorted({str(file.parent) for file in found.files})
            raise InputError(f"there is no recording of rank {rank} in {', '.join(folders)}")
    try:
        return FORMATS[form](sorted(files, key=_rank_of), Path(out), found.inputs)
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror}: give --out another place"
        ) from None


def _rank_of(path: Path) -> int:
    with opened(path) as recorded:
        return recorded.rank


def _csv(files: Sequence[Path], out: Path, inputs: Sequence[Path]) -> list[Path]:
    """Two tables: one row a step, one row a storage."""
    out.mkdir(parents=True, exist_ok=True)
    steps, storages = out / "steps.csv", out / "storages.csv"
    with whole(steps, inputs=inputs) as some, whole(storages, inputs=inputs) as others:
        wide: csv.DictWriter[str] | None = None
        lives = csv.writer(others)
        lives.writerow(_COLUMNS)
        for file in files:
            with opened(file) as recorded:
                for row in recorded.steps():
                    if wide is None:
                        wide = csv.DictWriter(some, ["rank", *row], extrasaction="ignore")
                        wide.writeheader()
                    wide.writerow({"rank": recorded.rank, **row})
                for life in recorded.lives():
                    lives.writerow([recorded.rank, *_cells(life)])
    return [steps, storages]


def _cells(life: Life) -> list[Any]:
    died = f"{life.died:.6f}" if life.died is not None else ""
    made = [life.number, life.nbytes, life.device, *life.origin.values(), life.kind, life.name]
    return [*made, life.born_step, life.died_step, f"{life.born:.6f}", died]


def _trace(files: Sequence[Path], out: Path, inputs: Sequence[Path]) -> list[Path]:
    """Chrome's trace events: memory as counters, storages as spans, one process a rank."""
    with whole(out, inputs=inputs) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        between = ""
        for number, path in enumerate(files):
            with opened(path) as recorded:
                for event in _trace_events(recorded, number):
                    file.write(between + json.dumps(event, separators=(",", ":")))
                    between = ",\n"
        file.write("\n]}\n")
    return [out]


def _trace_events(recorded: Recorded, process: int) -> Iterator[dict[str, Any]]:
    here = {"pid": process, "tid": 0}
    yield {"ph": "M", "name": "process_name", "args": {"name": recorded.name}, **here}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": recorded.rank}, **here}
    begin = 0.0
    for row in recorded.steps():
        now = 1e6 * row["seconds"]
        shown = {name: row[name] for name in _COUNTERS if row.get(name) is not None}
        yield {"ph": "C", "name": "memory", "ts": now, "args": shown, **here}
        step = {"name": f"step {row['step']}", "cat": "step", "ts": begin, "dur": now - begin}
        yield {"ph": "X", **step, **here}
        begin = now
    for life in recorded.lives():
        ends = life.died if life.died is not None else begin / 1e6
        name = life.origin["op"] or "storage"
        told = {"bytes": life.nbytes, "device": life.device, "kind": life.kind, **life.origin}
        span = {"cat": life.origin["phase"] or "storage", "id": f"{process}.{life.number}", **here}
        first = max(0.0, 1e6 * life.born)
        yield {"ph": "b", "name": name, "ts": first, "args": told, **span}
        yield {"ph": "e", "name": name, "ts": max(first, 1e6 * ends), **span}


def _snapshot(files: Sequence[Path], out: Path, inputs: Sequence[Path]) -> list[Path]:
    """One process, as PyTorch's memory viewer reads it."""
    with opened(files[0]) as recorded:
        found = snapshot_of(recorded.lives())
    with whole(out, "wb", inputs) as file:
        pickle.dump(found, file)
    return [out]


FORMATS: dict[str, Callable[[Sequence[Path], Path, Sequence[Path]], list[Path]]] = {
    "csv": _csv,
    "trace": _trace,
    "snapshot": _snapshot,
}
