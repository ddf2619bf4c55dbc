"""Watching storages on CUDA devices, through the library that is loaded where they are used.

Where Tenure was built without CUDA's headers there is no such library. Then torch's own memory
history says which blocks are allocated and by which line: no operator, no module, and of a block
that comes and goes within a step nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tenure import _C
from tenure.inspect.options import say
from tenure.inspect.source import is_library

__all__ = ["History", "history", "unwatch", "watch_when_used"]

_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libtenure_cuda.so"
_READS = 64  # of history, whatever they take, so that short programs are told of too
_SHARE = 0.01  # of the time may go to further ones
_asked = False
_known: dict[int, tuple[int, str]] = {}  # blocks that the observer was told of: size and line


class History:
    """The blocks of torch's CUDA allocator, read at the ends of steps."""

    def __init__(self) -> None:
        """Begins to record, unless the program does."""
        self.ours = not torch._C._cuda_isHistoryEnabled()
        self._record = torch.cuda.memory._record_memory_history
        if self.ours:
            self._record("state", context="state", stacks="python")
        # From when the program asks for a history of its own, it is the program's.
        setattr(torch.cuda.memory, "_record_memory_history", self._program_records)  # noqa: B010
        self._reads = 0
        self._spent = 0.0
        self._began = time.monotonic()

    def read(self) -> None:
        """Tells the observer what came and went since last time, if it is worth the time."""
        now = time.monotonic()
        self._reads += 1
        if self._reads > _READS and self._spent > _SHARE * (now - self._began):
            return
        blocks = {
            block["address"]: (device, block["requested_size"], _site(block["frames"]))
            for device in range(torch.cuda.device_count())
            for segment in torch.cuda.memory._snapshot(device)["segments"]
            if segment["device"] == device
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        for address, (size, site) in list(_known.items()):
            if address not in blocks or blocks[address][1:] != (size, site):
                _C.device_died(address, size)
                del _known[address]
        for address, (device, size, site) in blocks.items():
            if address not in _known:
                _C.device_born(address, size, device, site)
                _known[address] = (size, site)
        self._spent += time.monotonic() - now

    def _program_records(self, *args: Any, **kwargs: Any) -> None:
        self.ours = False
        self._record(*args, **kwargs)

    def stop(self) -> None:
        """Ends what it began."""
        setattr(torch.cuda.memory, "_record_memory_history", self._record)  # noqa: B010
        if self.ours and torch._C._cuda_isHistoryEnabled():
            self._record(None)


history: History | None = None


def _site(frames: list[Mapping[str, Any]]) -> str:
    """The innermost line of the user's."""
    for frame in frames:
        file = frame["filename"]  # "??" or a library's, of C++
        if file.endswith((".py", ">")) and not is_library(file):
            return f"{file}:{frame['line']} {frame['name']}"
    return ""


def watch_when_used() -> None:
    """From when the program first uses CUDA; where it does already, from now on."""
    global _asked
    if _asked or torch.version.cuda is None:
        return
    _asked = True
    torch.cuda._lazy_call(_watch)  # type: ignore[no-untyped-call]


def unwatch() -> None:
    """Ends what can be ended: torch's history if it is used. Another session begins it anew."""
    global history, _asked
    if history is not None:
        history.stop()
        history, _asked = None, False


def _watch() -> None:
    global _asked
    if _C.observed_level() == "off":  # the program used CUDA only after watching had ended
        _asked = False
        return
    why = _watch_allocator()
    if why:
        global history
        history = History()
        say(f"of storages on CUDA devices only the lines that made them are known: {why}")
        return
    _C.see_devices()
    with _C.References([]) as references:
        references.adopt()


def _watch_allocator() -> str:
    """Why the allocator cannot be watched, or an empty text if it is."""
    if not _LIBRARY.exists():
        return "this build has no libtenure_cuda, which needs cuda_runtime_api.h to build"
    library = ctypes.CDLL(str(_LIBRARY))
    library.tenure_watch_cuda.restype = ctypes.c_char_p
    why = library.tenure_watch_cuda()
    return why.decode(errors="replace").splitlines()[0] if why is not None else ""
