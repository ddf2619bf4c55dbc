"""One look at all that is alive, as data: what `tenure attach --once` shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tenure import _C
from tenure.inspect import census, holders
from tenure.inspect.moments import at_rest
from tenure.inspect.options import rank_of

__all__ = ["SCHEMA", "look"]

SCHEMA = 1
_MOST_HELD = 64  # holders that are told
_MOST_WAYS = 256  # of the largest storages whose way is asked for
_MOST_CYCLES = 16


def look() -> dict[str, Any]:
    """Who holds what is alive: bytes by holder, each with the way to its largest storage.

    Raises NotNow if other threads do not come to rest. For the main thread, or where that sleeps.
    """
    with at_rest(holders.own_objects()) as references:
        found = census.census_in(references)
        ways = _ways(references)
        by_device = references.bytes_by_device()
        count = len(references.storages())
        objects = references.size
    explained = found.rooted + found.in_cycles
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "rank": rank_of(),
        "objects": objects,
        "storages": count,
        "bytes": found.nbytes,
        "rooted": found.rooted,
        "in_cycles": found.in_cycles,
        "residue": found.residue,
        "explained": round(explained / found.nbytes, 6) if found.nbytes else 1.0,
        "watched": _C.observed_level(),
        "rss": _resident(),
        "devices": _devices(by_device),
        "held": [
            {"text": h.holder, "bytes": h.nbytes, "count": h.count, "path": ways.get(h.holder, [])}
            for h in found.held[:_MOST_HELD]
        ],
        "cycles": [cycle.as_json() for cycle in found.cycles[:_MOST_CYCLES]],
    }


def _ways(references: _C.References) -> dict[str, list[dict[str, Any]]]:
    """For each holder the way to the largest storage that it holds."""
    reached = [(nbytes, node) for _, nbytes, node, reached, _ in references.storages() if reached]
    out: dict[str, list[dict[str, Any]]] = {}
    for _, node in sorted(reached, reverse=True)[:_MOST_WAYS]:
        _, path, *_ = references.retention(node)
        hops = holders.retention_path(path)
        if hops and hops[0].text not in out:
            out[hops[0].text] = [hop.as_json() for hop in holders.collapsed(hops)]
    return out


def _devices(found: dict[str, int]) -> dict[str, dict[str, int]]:
    """Bytes that were found on each device, and how many its allocator has given out."""
    out = {device: {"found": nbytes} for device, nbytes in found.items()}
    if torch.version.cuda is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            allocated = torch.cuda.memory_allocated(index)
            if allocated or f"cuda:{index}" in out:
                out.setdefault(f"cuda:{index}", {"found": 0})["allocated"] = allocated
    return out


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
