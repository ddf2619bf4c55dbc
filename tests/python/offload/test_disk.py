"""On disk: the same gradients, nothing left of the files, and a full disk is told, not suffered."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tenure
from offloading import MIB, Keep, batch, blocks, equal, gradients
from probes import assert_ends_well, needs_real_frees
from slow_copies import N, Slow, full, values
from unsteady import growth

HERE = Path(__file__).parent


def on_disk(folder: Path, *models: Any, **options: Any) -> tenure.Offload:
    return tenure.Offload(*models, target=f"disk:{folder}", min_bytes=1, **options)


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    assert holds()


def links() -> list[Path]:
    """Of open files, to their names."""
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def descriptors() -> set[str]:
    return {str(link.readlink()) for link in links()}


def test_gradients_are_those_without(tmp_path: Path) -> None:
    model = blocks()
    offload = on_disk(tmp_path, model)
    for rows in (32, 32, 32, 700, 33, 700):
        x = batch(rows)
        assert equal(gradients(model, x, offload), gradients(model, x))
        stats = offload.stats()
        assert min(stats.moved_out_bytes, stats.moved_in_bytes) > 0
        eventually(lambda: offload.stats().disk_bytes == 0)  # a write may be under way
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("streams", [0, 1, 2])
def test_from_a_device(fake: ModuleType, tmp_path: Path, streams: Any) -> None:
    del fake
    model, x = blocks(device="fake"), batch(device="fake")
    plain = gradients(model, x)
    offload = on_disk(tmp_path, model, streams=streams)
    for _ in range(4):
        assert equal(gradients(model, x, offload), plain)
    assert offload.stats().moved_out_bytes > 0


def slow_to(folder: Path, fake: ModuleType) -> Slow:
    return Slow(fake, target=f"disk:{folder}")


def let_it_write(slow: Slow) -> None:
    """So that host memory is free. If that takes longer, the test says nothing."""
    slow.run()
    time.sleep(0.2)


def test_it_writes_what_has_arrived(fake: ModuleType, tmp_path: Path) -> None:
    slow = slow_to(tmp_path, fake)
    found: list[Tensor] = []
    with slow.offload:
        slow.hold()
        saved = slow.save(full(3, 6 * N), use=found.extend)
        time.sleep(0.2)
        let_it_write(slow)
        slow.backward(saved)
        slow.run()
    assert values(found[0]) == {3}


def test_it_reads_to_where_no_copy_reads(fake: ModuleType, tmp_path: Path) -> None:
    slow = slow_to(tmp_path, fake)
    found: list[Tensor] = []
    with slow.offload:
        first = slow.save(full(3, 6 * N), use=found.extend)
        let_it_write(slow)
        second = slow.save(full(5, 6 * N), use=found.extend)
        let_it_write(slow)
        slow.hold()
        slow.backward(first)
        slow.backward(second)
        slow.run()
    assert [values(tensor) for tensor in found] == [{3}, {5}]


def test_views_share_one_place(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    offload = on_disk(tmp_path)
    with offload:
        base = torch.arange(1 << 18, dtype=torch.int32)
        views = [base, base[1000:].view(torch.int16)[::2], base.view(512, -1).t()[3:]]
        expected = [view.clone() for view in views]
        loss = Keep.apply(torch.ones(1, requires_grad=True), seen, *views).sum()
        del base, views
        loss.backward()
    assert offload.stats().moved_out_storages == 1
    assert all(map(torch.equal, seen, expected))


def test_more_than_is_in_memory_at_once(tmp_path: Path) -> None:
    """Host memory is a way station: 24 storages of 4 MiB pass through a third of that."""
    offload = on_disk(tmp_path, host_limit=32 * MIB)
    for _ in range(3):
        seen: list[Tensor] = []
        with offload:
            x = torch.ones(1, requires_grad=True)
            for n in range(24):
                x = Keep.apply(x, seen, torch.full((MIB,), float(n)))
            x.sum().backward()
        assert [tensor[0].item() for tensor in seen] == list(range(23, -1, -1))
        assert all(bool((tensor == tensor[0]).all()) for tensor in seen)
    stats = offload.stats()
    assert stats.moved_out_bytes == 24 * 4 * MIB
    assert stats.file_bytes >= stats.moved_out_bytes / 2
    assert "moved to disk" in str(stats)
    assert "in a file of" in str(stats)


def test_the_file_has_no_name_and_goes_with_the_offload(tmp_path: Path) -> None:
    before = descriptors()
    offload = on_disk(tmp_path)
    model, x = blocks(), batch()
    with offload:
        loss = model(x).sum()
        added = descriptors() - before
        assert any(name.startswith(str(tmp_path)) and "(deleted)" in name for name in added), added
        assert not any(tmp_path.iterdir())
        loss.backward()
    del loss, offload
    assert not any(name.startswith(str(tmp_path)) for name in descriptors())


def test_a_graph_may_outlive_its_offload(tmp_path: Path) -> None:
    model, x = blocks(), batch()
    plain = gradients(model, x)
    model.zero_grad()
    with on_disk(tmp_path, model):
        loss = model(x).square().sum()
    loss.backward()
    assert equal([p.grad for p in model.parameters() if p.grad is not None], plain)


LIMIT = """
    import resource, signal, sys
    sys.path[:0] = [{tests!r}]
    import tenure, torch
    from offloading import MIB, Keep

    # As a full disk does, but for this process alone.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, resource.RLIM_INFINITY))
    offload = tenure.Offload(target="disk:{folder}", min_bytes=1, **{options!r})

    def step(storages):
        seen = []
        with offload:
            x = torch.ones(1, requires_grad=True)
            for n in range(storages):
                x = Keep.apply(x, seen, torch.full((MIB,), float(n)))
            x.sum().backward()
        return [tensor[0].item() for tensor in seen] == list(range(storages - 1, -1, -1))
"""


def limited(folder: Path, program: str, **options: Any) -> str:
    start = LIMIT.format(tests=str(HERE.parent), folder=folder, options=options)
    return assert_ends_well(start + program)


def test_a_full_disk_is_one_clear_error_and_the_next_step_works(tmp_path: Path) -> None:
    said = limited(
        tmp_path,
        """
    try:
        for _ in range(5):
            step(64)
    except tenure.BudgetError as error:
        print(error)
    assert step(1)
    """,
        host_limit=64 * MIB,  # so that a step waits for the disk
    )
    assert said.startswith(f"cannot offload more to {tmp_path}: File too large after ")
    assert "free some room there, or give host_full" in said


def test_a_full_disk_keeps_on_the_device_what_does_not_fit(tmp_path: Path) -> None:
    said = limited(
        tmp_path,
        """
    assert all(step(64) for _ in range(5))
    print(offload.stats().kept["disk full"][0] > 0)
    """,
        host_full="keep",
        host_limit=64 * MIB,
    )
    assert said.strip() == "True"


@needs_real_frees
def test_the_process_does_not_grow(tmp_path: Path) -> None:
    assert growth(f"disk:{tmp_path}", 200) < 2 * MIB


def test_a_host_limit_is_waited_for_and_not_met_in_backward(tmp_path: Path) -> None:
    """The disk is slower than the step: 32 MiB go through 4 MiB of host memory."""
    offload = on_disk(tmp_path, host_limit=4 * MIB)
    for _ in range(4):
        seen: list[Tensor] = []
        with offload:
            x = torch.ones(1, requires_grad=True)
            for n in range(32):
                x = Keep.apply(x, seen, torch.full((MIB // 4,), float(n)))
            x.sum().backward()
        assert [tensor[0].item() for tensor in seen] == list(range(31, -1, -1))
    assert offload.stats().kept == {}


def test_a_disk_without_any_room_is_tried_again(tmp_path: Path) -> None:
    said = limited(
        tmp_path,
        """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    for _ in range(3):
        try:
            step(8)
        except tenure.BudgetError as error:
            print("full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(step(8))
    """,
    )
    assert said.split()[-1] == "True"


def test_the_file_shrinks_when_steps_do(tmp_path: Path) -> None:
    offload = on_disk(tmp_path)

    def file_after_step(storages: int) -> int:
        with offload:
            x = torch.ones(1, requires_grad=True)
            for _ in range(storages):
                x = Keep.apply(x, [], torch.ones(MIB // 4))
            x.sum().backward()
        return int(offload.stats().file_bytes)

    file_after_step(32)
    file_after_step(32)
    eventually(lambda: file_after_step(2) <= 4 * MIB)


def test_it_tells_the_disks_time_and_not_that_of_copies_in_memory(tmp_path: Path) -> None:
    """With so little memory every storage waits until one before it has been written."""
    size = 4 * MIB
    offload = tenure.Offload(target=f"disk:{tmp_path}", min_bytes=1, host_limit=4 * size)
    begin = time.perf_counter()
    with offload:
        x = torch.ones(1, requires_grad=True)
        for _ in range(24):
            x = Keep.apply(x, [], torch.ones(size // 4))
        x.sum().backward()
    took = time.perf_counter() - begin
    stats = offload.stats()
    assert 0.2 * took < stats.exposed_seconds < took
    assert 24 * size / took / 4 < stats.out_bandwidth
    assert stats.out_bandwidth * stats.exposed_seconds < 2 * 24 * size + stats.in_bandwidth * took
