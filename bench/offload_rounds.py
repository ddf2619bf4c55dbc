"""How bench/offload.py measures: arms in turn, from a device at rest to a device at rest."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from offload_arms import Arm, Job, Reference, Way, groups
from offload_bars import Found, Run, Step
from offload_device import GIB, Cpu, Device, host_free

import tenure

FAILURES = (RuntimeError, ValueError, MemoryError, tenure.TenureError)
FEWEST = 3  # timed steps of an arm, however long they take
_BEGIN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGIN:6.1f} s] {text}", flush=True)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def timed(device: Device, job: Job, arm: Arm) -> Step:
    """One step from rest to rest. Nothing in it waits for the device but what the arm does."""
    job.clear()
    with job.checkpointing(arm.checkpoint):
        device.rest()
        device.forget_peaks()
        begin = time.perf_counter()
        start = device.mark()
        with arm.context():
            loss = job.loss()
            middle = device.mark()
            loss.backward()
        end = device.mark()
        device.rest()
        took = time.perf_counter() - begin
    return Step(took, device.between(start, middle), device.between(middle, end), device.peak())


def look(device: Device, job: Job, arm: Arm, found: Found) -> None:
    """One step with a stop after forward: what is on the device then, and what is copied."""
    job.clear()
    device.rest()
    device.forget_peaks()
    pinned = device.pinned()

    def step() -> None:
        with job.checkpointing(arm.checkpoint), arm.context():
            loss = job.loss()
            device.rest()
            arm.settle()
            gc.collect()
            found.after = device.allocated()
            loss.backward()

    copied = device.copied(step)
    if copied is not None:
        found.out, found.back = copied
    if arm.offload is not None:
        found.pinned = int(found.said["pinned_bytes"])
        if copied is None:
            found.out = int(found.said["moved_out_bytes"])
            found.back = int(found.said["moved_in_bytes"])
    elif pinned is not None:
        found.pinned = (device.pinned("peak") or 0) - pinned


def said(offload: tenure.Offload | tenure.Fit) -> dict[str, Any]:
    """Every figure that it gives of its last step."""
    stats = offload.stats()
    figures = {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}
    return {name: x for name, x in figures.items() if isinstance(x, int | float | str)}


class Group:
    """Arms that are measured in turn. One that fails says so and is left out from then on."""

    def __init__(self, device: Device, job: Job, run: Run, number: int) -> None:
        self._device, self._job, self._run, self._number = device, job, run, number
        self._arms: dict[str, Arm] = {}
        self._founds: dict[str, Found] = {}

    def make(self, way: Way) -> None:
        found = Found(way.name, self._number)
        self._founds[way.name] = found
        self._run.founds.append(found)

        def made() -> None:
            arm = way.make(self._job, self._run.reference)
            self._arms[way.name], found.budget = arm, arm.budget

        self._try(way.name, made)

    def measure(self, warm: int, rounds: int, seconds: float) -> None:
        # Ours plans in its first steps; a peer of seconds a step is warm after two.
        peers = {name for name, arm in self._arms.items() if arm.offload is None}
        self._in_turn(
            warm, self._warm, lambda name, n, spent: name in peers and n > 1 and spent > seconds
        )
        self._in_turn(rounds, self._time, lambda _name, n, spent: n >= FEWEST and spent > seconds)
        for name in list(self._arms):
            self._try(name, lambda name=name: self._look(name))

    def _in_turn(
        self, rounds: int, act: Callable[[str], None], enough: Callable[[str, int, float], bool]
    ) -> None:
        """Every arm once a round, each round from another one on, until it had enough."""
        spent = dict.fromkeys(self._arms, 0.0)
        for number in range(rounds):
            names = list(self._arms)
            at = number % max(1, len(names))
            for name in names[at:] + names[:at]:
                if enough(name, number, spent[name]):
                    continue
                begin = time.perf_counter()
                self._try(name, lambda name=name: act(name))
                spent[name] += time.perf_counter() - begin

    def _warm(self, name: str) -> None:
        timed(self._device, self._job, self._arms[name])

    def _time(self, name: str) -> None:
        arm, found = self._arms[name], self._founds[name]
        found.steps.append(timed(self._device, self._job, arm))
        self._job.clear()
        found.held = self._device.allocated() - self._run.reference.rest
        if arm.offload is not None:
            found.said = said(arm.offload)

    def _look(self, name: str) -> None:
        look(self._device, self._job, self._arms[name], self._founds[name])

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  what a peer raises is a result
            found = self._founds[name]
            found.error = first_line(error)
            self._arms.pop(name, None)
            say(f"{name} failed: {found.error}")
        if self._founds[name].error is not None:  # out here: the error held the step's frames
            self._job.clear()
            self._device.release()


def saved_bytes(job: Job) -> int:
    """Bytes of what forward saves beside parameters, where no allocator tells."""
    known = {parameter.untyped_storage().data_ptr() for parameter in job.model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        job.loss()
    return sum(seen.values())


def reference_of(device: Device, job: Job) -> Reference:
    """What arm none holds. On a CPU no allocator tells, so what is saved stands for it."""
    if isinstance(device, Cpu):
        saved = saved_bytes(job)
        return Reference(0, saved, saved)
    none = Arm("none")
    for _ in range(2):
        peak = timed(device, job, none).peak
    job.clear()
    rest = device.allocated()
    loss = job.loss()
    device.rest()
    after = device.allocated()
    del loss
    return Reference(rest, after, peak)


def measured(
    device: Device, job: Job, tokens: int, chosen: list[Way], options: argparse.Namespace
) -> Run:
    job.resize(tokens)
    run = Run(tokens, reference_of(device, job), device.bandwidth())
    device.release()
    parts = groups(chosen, run.reference, options.host * GIB)
    for number, part in enumerate(parts):
        say(f"T {tokens}, group {number + 1} of {len(parts)}: {', '.join(w.name for w in part)}")
        group = Group(device, job, run, number)
        for way in part:
            group.make(way)
        group.measure(options.warm, options.rounds, options.seconds)
        del group
        job.clear()
        device.release()
        say(f"{host_free() / GIB:.1f} GiB of the host are free")
    return run
