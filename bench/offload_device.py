"""Where the job of bench/offload.py runs: clocks, memory and copies of a device."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GIB = 2**30


def host_free() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Gpu:
    """The current CUDA device."""

    name = "cuda"

    def rest(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """A moment of the stream that computes; the host does not wait for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def forget_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        if hasattr(torch.cuda, "reset_peak_host_memory_stats"):
            torch.cuda.reset_peak_host_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def pinned(self, what: str = "current") -> int | None:
        """Bytes that torch's allocator of pinned memory has given out, as large as it made them."""
        if not hasattr(torch.cuda, "host_memory_stats"):
            return None
        return int(torch.cuda.host_memory_stats().get(f"active_bytes.{what}", 0))

    def release(self) -> None:
        """Gives back what is cached on the device and on the host."""
        gc.collect()
        self.rest()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()

    def bandwidth(self) -> tuple[float, float]:
        """Bytes a second to the host and back: medians of pinned copies of 1 GiB."""
        there = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        here = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        out = self._copy_speed(here, there)
        back = self._copy_speed(there, here)
        del there, here
        self.release()
        return out, back

    def _copy_speed(self, to: torch.Tensor, source: torch.Tensor) -> float:
        found = []
        for _ in range(6):
            begin = self.mark()
            to.copy_(source, non_blocking=True)
            end = self.mark()
            self.rest()
            found.append(GIB / self.between(begin, end))
        return statistics.median(found[1:])

    def copied(self, run: Callable[[], None]) -> tuple[int, int] | None:
        """Bytes that the device copied to the host and back meanwhile, as its profiler saw them."""
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        with profiler:
            run()
            self.rest()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            text = path.read_text(errors="replace")
        try:
            return _copies(json.loads(text, strict=False)["traceEvents"])
        except (ValueError, KeyError):
            return None


def _copies(events: list[dict[str, Any]]) -> tuple[int, int] | None:
    if not any(event.get("cat") == "kernel" for event in events):
        return None  # nothing was seen at all
    out = back = 0
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            out += int(event["args"]["bytes"]) * ("DtoH" in event["name"])
            back += int(event["args"]["bytes"]) * ("HtoD" in event["name"])
    return out, back


class Cpu:
    """Stands in for a device where there is none; what a CPU cannot tell is 0 or None."""

    name = "cpu"

    def rest(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def allocated(self) -> int:
        return 0

    def forget_peaks(self) -> None:
        pass

    def peak(self) -> int:
        return 0

    def pinned(self, what: str = "current") -> int | None:  # noqa: ARG002
        return None

    def release(self) -> None:
        gc.collect()

    def bandwidth(self) -> tuple[float, float]:
        """A copy of 64 MiB on the host, the same for both ways."""
        source, to = (
            torch.zeros(64 << 20, dtype=torch.uint8),
            torch.zeros(64 << 20, dtype=torch.uint8),
        )
        begin = self.mark()
        to.copy_(source)
        speed = source.numel() / self.between(begin, self.mark())
        return speed, speed

    def copied(self, run: Callable[[], None]) -> tuple[int, int] | None:
        run()
        return None


Device = Gpu | Cpu
