"""The parts of a snapshot: what this process knows of its memory that C++ alone does not.

Each part is small whatever the program is like, and one that fails or comes too late is named among
those left out; it takes no other with it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch

from tenure import _C
from tenure.inspect import census, holders
from tenure.inspect.moments import Job, MainThread, at_rest
from tenure.leases import leases

__all__ = ["add_holders", "add_quick", "fitted", "frames_of", "sentence"]

Document = dict[str, Any]

_MOST = 20  # of anything
_MOST_ASKED = 4096  # of the largest storages, for who holds them
_MOST_FRAMES = 64
_MOST_THREADS = 64
_FIRST_TO_GO = ("segments", "stacks", "samples", "trace", "ledger", "holders", "earlier")
_BRIEF = ("rank", "time", "step", "headline", "host_memory", "devices")
_FEW = 5  # of what is past

# Where the interpreter keeps what nothing caught while hooks are called.
_LAST_ERROR = {f"last_{name} (global of sys)" for name in ("exc", "traceback", "value")}


def add_quick(document: Document, rows: Callable[[], Sequence[Mapping[str, Any]]] | None) -> None:
    """Adds what takes milliseconds."""
    parts: dict[str, Callable[[], Any]] = {
        "stacks": _stacks,
        "ledger": lambda: {**document.get("ledger", {}), **_ledger()},
        "segments": _segments,
    }
    if rows is not None:
        parts["samples"] = lambda: [dict(row) for row in rows()]
    for name, part in parts.items():
        _add(document, name, part)


def add_holders(document: Document, deadline: float) -> None:
    """Adds who holds what, at the first safe moment before the deadline (of `time.monotonic`)."""
    found: list[Document] = []
    job = Job(lambda: found.append(_holders()))
    if threading.current_thread() is threading.main_thread():
        while not job.done.is_set() and time.monotonic() < deadline:
            job.run_if_safe()
            time.sleep(0.01)
    else:
        main = MainThread()
        while not job.done.wait(0.02) and time.monotonic() < deadline:
            job.post()
            if main.sleeps():
                job.run_if_safe()
    if not job.done.is_set() and not job.give_up():
        job.done.wait()  # the main thread is at it
    if found:
        document["holders"] = found[0]
    else:
        why = job.error or "no moment at which other threads rest came in time"
        _leave_out(document, "holders", why)


def fitted(document: Document, cap: int) -> str:
    """The document as JSON of at most that many bytes, without the parts that did not fit."""
    kept = dict(document)
    for name in _FIRST_TO_GO:
        text = json.dumps(kept, ensure_ascii=False)
        if len(text.encode(errors="replace")) <= cap:
            return text
        if name == "samples" and len(kept.get("samples", [])) > 1:
            kept["samples"] = kept["samples"][-1:]
        elif kept.pop(name, None) is None:
            continue
        kept["left_out"] = {**kept.get("left_out", {}), name: f"more than {cap:,} bytes in all"}
    return json.dumps(kept, ensure_ascii=False)


def brief(document: Document) -> Document:
    """What is worth knowing of a failure once it is past: what it was, and what held the memory."""
    kept = {name: document[name] for name in _BRIEF if name in document}
    held = document.get("holders", {}).get("held", [])[:_FEW]
    owners = document.get("ledger", {}).get("owners", [])[:_FEW]
    return {
        **kept,
        **({"trace": document["trace"][-_FEW:]} if "trace" in document else {}),
        **({"holders": {"held": held}} if held else {}),
        **({"ledger": {"owners": owners}} if owners and not held else {}),
    }


def frames_of(trace: TracebackType | None) -> list[str]:
    """The lines that an exception came through, the innermost last."""
    found = traceback.walk_tb(trace)
    return [_line(frame, number) for frame, number in list(found)[-_MOST_FRAMES:]]


def sentence(error: BaseException) -> str:
    """An exception in one line that is not too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 500 else text[:499] + "…"


def _add(document: Document, name: str, part: Callable[[], Any]) -> None:
    try:
        found = part()
    except Exception as error:  # noqa: BLE001  whatever it is, the other parts are worth having
        _leave_out(document, name, sentence(error))
    else:
        if found:
            document[name] = found


def _leave_out(document: Document, name: str, why: str) -> None:
    document.setdefault("left_out", {})[name] = why


def _ledger() -> Document:
    """The owners that hold most, and the largest leases."""
    table = leases()
    owners = list(table.by_owner().items())[:_MOST]
    sizes = table.bytes
    largest = np.argsort(sizes)[::-1][:_MOST].tolist()
    return {
        "owners": [
            {**owner._asdict(), "bytes": totals.bytes, "leases": totals.leases}
            for owner, totals in owners
        ],
        "largest": [
            {
                **table.owner_of(int(table.owner[i]))._asdict(),
                "bytes": int(sizes[i]),
                "device": _C.device_from_tag(int(table.device[i])),
                "scope": table.scope_of(int(table.scope[i])),
                "age": round(float(table.age[i]), 3),
            }
            for i in largest
        ],
    }


def _holders() -> Document:
    """Who holds what is alive, and the largest storages with the way to each."""
    with at_rest(holders.own_objects()) as references:
        storages = sorted(references.storages(), key=lambda one: -one[1])
        held: dict[str, Document] = {}
        ways: list[Document] = []
        for _, nbytes, node, reached, _ in storages[:_MOST_ASKED]:
            hops = _way(references, node) if reached else []
            if not hops:
                continue
            if len(ways) < _MOST:
                path = holders.path_text(holders.collapsed(hops))
                ways.append({"bytes": nbytes, "path": path})
            text = hops[0].text
            if text not in held:
                held[text] = {"text": text, "bytes": 0, "count": 0, "site": _site(hops)}
            held[text]["bytes"] += nbytes
            held[text]["count"] += 1
        cycles = census.cycles_in(references)
    return {
        "bytes": sum(nbytes for _, nbytes, *_ in storages),
        "storages": len(storages),
        "held": sorted(held.values(), key=lambda one: -one["bytes"])[:_MOST],
        "cycles": [cycle.as_json() for cycle in cycles[:_MOST]],
        "largest": ways,
    }


def _way(references: _C.References, node: int) -> list[holders.Hop]:
    """From a variable to the storage. That the exception has the frame is not why it is held."""
    _, path, *_ = references.retention(node)
    hops = holders.retention_path(path)
    while len(hops) > 1 and hops[0].text in _LAST_ERROR:
        del hops[0]
    unnamed = hops and (hops[0].kind == "root" or (hops[0].kind == "local" and not hops[0].name))
    if unnamed and len(hops) > 1 and hops[1].kind == "exception":  # one that is being handled
        after = next((at for at, hop in enumerate(hops[1:], 1) if hop.kind != "exception"), 0)
        del hops[:after]
    return hops


def _site(hops: Sequence[holders.Hop]) -> str:
    """The lines of the user's source that put something into the variable, where they are known."""
    first, text = hops[0], hops[0].text
    first.leak = True
    holders.add_lines(hops)
    found = first.text.removeprefix(text).strip(" ()").removeprefix("kept at ")
    first.leak, first.text = False, text
    return found


def _segments() -> list[Document]:
    """CUDA's segments, added up by device, pool and stream. Does not wake CUDA."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    sums: dict[tuple[str, str, str], Document] = {}
    for one in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        key = f"cuda:{one['device']}", str(one.get("segment_type", "")), hex(one.get("stream", 0))
        names = dict(zip(("device", "pool", "stream"), key, strict=True))
        fresh = {**names, "segments": 0, "bytes": 0, "allocated": 0, "largest_free": 0}
        total = sums.setdefault(key, fresh)
        free = (block["size"] for block in one["blocks"] if block["state"] == "inactive")
        total["segments"] += 1
        total["bytes"] += one["total_size"]
        total["allocated"] += one["allocated_size"]
        total["largest_free"] = max(total["largest_free"], *free, 0)
    return sorted(sums.values(), key=lambda one: -one["bytes"])[:_MOST]


def _stacks() -> list[Document]:
    """Where each thread of Python's is, the innermost line last; the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda one: one[0] != main)
    return [
        {"thread": names.get(ident, str(ident)), "frames": _frames(frame)}
        for ident, frame in found[:_MOST_THREADS]
    ]


def _frames(innermost: FrameType) -> list[str]:
    found: Iterable[tuple[FrameType, int]] = traceback.walk_stack(innermost)
    return [_line(frame, number) for frame, number in list(found)[:_MOST_FRAMES]][::-1]


def _line(frame: FrameType, number: int) -> str:
    return f"{frame.f_code.co_filename}:{number} in {frame.f_code.co_name}"
