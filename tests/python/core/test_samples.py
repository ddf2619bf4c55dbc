"""Samples from Python; the figures themselves are tested in tests/cpp/core/sample_test.cpp."""

from __future__ import annotations

import math
import mmap
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tenure
from probes import assert_ends_well
from tenure.samples import MappedSample, refresh_samples, sample

MIB = 1 << 20


def test_rss_follows_a_tensor() -> None:
    """In a process of its own: an allocator gives out again, or lets go, what others have freed."""
    assert_ends_well("""
    import torch
    from tenure.samples import sample

    kept = torch.ones(16 << 20)  # torch's own threads start
    before = sample().process.rss
    block = torch.ones(16 << 20)
    risen = sample().process.rss - before
    assert abs(risen - block.nbytes) < 8 << 20, risen  # an allocator may round up
    """)


def test_shared_memory_is_seen() -> None:
    before = sample().process.shared
    block = mmap.mmap(-1, 32 * MIB)
    block.write(bytes(32 * MIB))
    after = sample().process.shared
    assert before is not None
    assert after is not None
    assert abs(after - before - 32 * MIB) < MIB


def test_a_sample_cannot_be_changed_and_shows_its_fields() -> None:
    process = sample().process
    with pytest.raises(AttributeError):
        process.rss = 0  # type: ignore[misc]
    assert f"rss={process.rss}, virtual_size={process.virtual_size}" in repr(process)


def walk() -> MappedSample:
    """The first walk of the address space since the call: an earlier test may have left one."""
    called = time.monotonic()
    while (mapped := sample().process.mapped) is None or mapped.age > time.monotonic() - called:
        pass
    return mapped


def test_pss_while_refreshed() -> None:
    with refresh_samples(0.01) as refresh:
        mapped = walk()
    assert 0 < mapped.pss <= mapped.rss
    assert 0 <= mapped.age < 60
    refresh.stop()  # a second end is none


def running_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_the_thread_ends_with_the_block() -> None:
    before = running_threads()
    with refresh_samples(0.01):
        assert running_threads() == before + 1
    deadline = time.monotonic() + 10  # the kernel lists a joined thread a moment longer
    while running_threads() != before and time.monotonic() < deadline:
        pass
    assert running_threads() == before


@pytest.mark.parametrize("period", [0, -1, 1e-9, 1e9, math.inf, math.nan])
def test_a_period_that_cannot_be_meant_is_refused(period: float) -> None:
    with pytest.raises(tenure.InputError, match="every 1 ms to every day"):
        refresh_samples(period)


def test_sampling_while_other_threads_do() -> None:
    done = threading.Event()
    failures: list[BaseException] = []

    def use() -> None:
        try:
            while not done.is_set():
                with refresh_samples(0.001):
                    assert sample().process.rss > 0
        except BaseException as error:  # noqa: BLE001  handed to the test below
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        assert sample().process.rss > 0
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_without_an_accelerator_there_are_no_devices() -> None:
    assert sample().devices == []
    assert sample().pinned is None


def test_devices_are_as_their_allocator_says(fake: ModuleType) -> None:
    block = torch.zeros(MIB, dtype=torch.uint8, device="fake:1")
    pinned = torch.zeros(2 * MIB, dtype=torch.uint8).pin_memory()
    torch.zeros(3 * MIB, dtype=torch.uint8, device="fake:1")
    now = sample()
    assert [device.device for device in now.devices] == [
        torch.device("fake", index) for index in range(fake.device_count())
    ]
    device = now.devices[block.device.index]
    assert device.allocator is not None
    assert device.allocator.allocated.current == block.nbytes
    assert device.allocator.allocated.peak == 4 * MIB
    assert device.driver is not None
    assert device.driver.total - device.driver.free == device.allocator.reserved.current
    assert now.pinned is not None
    assert now.pinned.active == pinned.nbytes
