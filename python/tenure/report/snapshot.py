"""A recording as a snapshot of torch's CUDA allocator, which PyTorch's memory viewer opens.

The viewer knows blocks by their addresses, and recordings have none: storages are laid out anew, in
one segment a device, each at the lowest place that was free when it was born.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from typing import Any

from tenure.report.lives import Life, in_order

__all__ = ["snapshot_of"]

_SEGMENT = 1 << 40  # bytes between the segments of two devices
_ROUND = 512  # as torch's allocator rounds


class _Segment:
    """One device's memory, as an allocator that takes the first gap would have used it."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.end = begin
        self.used: dict[int, Life] = {}
        self._gaps: list[tuple[int, int]] = []  # begin and end, in order, not touching

    def take(self, life: Life) -> int:
        """An address for a storage that is born."""
        size = _rounded(life.nbytes)
        for at, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[at : at + 1] = [(begin + size, end)] if end - begin > size else []
                self.used[begin] = life
                return begin
        address = self.end
        self.end += size
        self.used[address] = life
        return address

    def give(self, address: int) -> None:
        """The storage there has died."""
        begin, end = address, address + _rounded(self.used.pop(address).nbytes)
        at = bisect.bisect(self._gaps, (begin, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at > 0 and self._gaps[at - 1][1] == begin:
            at -= 1
            begin = self._gaps.pop(at)[0]
        self._gaps.insert(at, (begin, end))

    def as_torch_has_it(self, device: int) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        for address, life in self.used.items():
            size = _rounded(life.nbytes)
            told = {"requested_size": life.nbytes, "state": "active_allocated"}
            blocks.append({"address": address, "size": size, "frames": _frames(life), **told})
        for begin, end in self._gaps:
            told = {"requested_size": end - begin, "state": "inactive"}
            blocks.append({"address": begin, "size": end - begin, "frames": [], **told})
        active = sum(_rounded(life.nbytes) for life in self.used.values())
        return {
            "device": device,
            "address": self.begin,
            "total_size": self.end - self.begin,
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(life.nbytes for life in self.used.values()),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": sorted(blocks, key=lambda block: int(block["address"])),
        }


def snapshot_of(lives: Iterable[Life]) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would have said, had all devices been CUDA's."""
    events = in_order(life for life in lives if life.nbytes > 0)
    devices = _numbered({life.device for _, _, life in events})
    segments = {device: _Segment(_SEGMENT * (i + 1)) for device, i in devices.items()}
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(devices.values(), default=-1) + 1)]
    places: dict[int, int] = {}
    for time, born, life in events:
        segment, trace = segments[life.device], traces[devices[life.device]]
        told = {"stream": 0, "time_us": int(1e6 * time), "frames": _frames(life)}
        if born:
            places[life.number] = segment.take(life)
        place = {"addr": places[life.number], "size": _rounded(life.nbytes), **told}
        if born:
            trace.append({"action": "alloc", **place})
        else:
            segment.give(places.pop(life.number))
            trace += [
                {"action": action, **place} for action in ("free_requested", "free_completed")
            ]
    for device, made in segments.items():
        whole = {"addr": made.begin, "size": made.end - made.begin, "stream": 0, "frames": []}
        traces[devices[device]].insert(0, {"action": "segment_alloc", "time_us": 0, **whole})
    return {
        "segments": [segments[device].as_torch_has_it(i) for device, i in devices.items()],
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUND) * _ROUND


def _numbered(devices: Iterable[str]) -> dict[str, int]:
    """Devices keep their numbers; the CPU, and one whose number is taken, come after them."""
    out: dict[str, int] = {}
    for device in sorted(devices, key=_device_order):
        number = device.partition(":")[2]
        after = max(out.values(), default=-1) + 1
        out[device] = int(number) if number and int(number) not in out.values() else after
    return out


def _device_order(device: str) -> tuple[bool, bool, str, int]:
    kind, _, number = device.partition(":")
    return kind == "cpu", kind != "cuda", kind, int(number or 0)


def _frames(life: Life) -> list[dict[str, Any]]:
    """Innermost first, as the viewer wants it: the operator, the module, the lines."""
    words = [life.origin["op"], life.origin["module"] and f"module {life.origin['module']}"]
    out = [{"filename": "??", "line": 0, "name": word} for word in words if word]
    for site in (life.origin["site"], life.origin["forward_site"]):
        found = re.fullmatch(r"(.*):(\d+) (\S+)", site)
        if found:
            out.append({"filename": found[1], "line": int(found[2]), "name": found[3]})
    return out
