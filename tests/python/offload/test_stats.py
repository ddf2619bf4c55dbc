"""What an Offload says of itself, to a program and to a person."""

from __future__ import annotations

import re
from types import ModuleType

import tenure
from offloading import MIB, batch, blocks, drop_graphs, gradients, tell

Fake = ModuleType


def test_figures_add_up(fake: Fake) -> None:
    tell(fake)
    model, x = blocks(device="fake"), batch(200, device="fake")
    offload = tenure.Offload(model, min_bytes=1)
    for n in range(1, 5):
        gradients(model, x, offload)
        drop_graphs()
        stats = offload.stats()
        others = sum(stats.kept[why][1] for why in stats.kept if why != "parameters and buffers")
        assert stats.steps == n
        assert stats.mode == ("measuring" if n == 1 else "planned")
        assert stats.saved_bytes == stats.moved_out_bytes + others
        assert stats.moved_in_bytes + stats.reused_bytes == stats.moved_out_bytes
        assert stats.kept_bytes == sum(nbytes for _, nbytes in stats.kept.values())
        assert stats.host_bytes == stats.tracked == 0
        assert stats.moved_out_bytes <= stats.most_host_bytes <= stats.pinned_bytes
        assert stats.out_bandwidth > 0
        assert stats.in_bandwidth > 0
        assert stats.exposed_seconds >= 0
    assert stats.least <= stats.peak <= stats.promised


def test_a_person_can_read_it(fake: Fake) -> None:
    tell(fake)
    model, x = blocks(layers=6, device="fake"), batch(1024, device="fake")
    offload = tenure.Offload(model, budget=4 * MIB, min_bytes=1)
    for _ in range(3):
        gradients(model, x, offload)
    size = r"\s+\d+(\.\d)? (B|KiB|MiB)"
    in_storages = rf"{size}  in \d+ storages?"
    expected = [
        "Offload: 3 steps, the last one planned",
        rf"  saved{in_storages}",
        rf"  moved to the host{in_storages}",
        rf"  and back{in_storages}",
        rf"  kept: parameters and buffers{in_storages}",
        rf"  kept: held by others anyway{in_storages}",
        rf"  kept: fits the budget{in_storages}",
        rf"  host{size} now,{size} at most,{size} taken",
        r"  copies \d+\.\d GB/s out, \d+\.\d GB/s back; the device waited \d+\.\d ms for them",
        rf"  peak{size} of a budget of 4.0 MiB, the least is{size}",
    ]
    # A line that depends on how fast the copies were.
    text = re.sub("  needed before they had left.*\n", "", str(offload))
    assert re.fullmatch("\n".join(expected) + "\n", text), str(offload)


def test_before_the_first_step() -> None:
    offload = tenure.Offload(target="copy")
    assert str(offload).startswith("Offload: 0 steps, the last one measuring\n")
    assert offload.stats().saved_bytes == 0


def test_a_backward_after_the_block_is_counted() -> None:
    model, x = blocks(), batch()
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    with offload:
        loss = model(x).square().sum()
    loss.backward()
    stats = offload.stats()
    assert stats.steps == 1
    assert stats.moved_out_bytes == stats.moved_in_bytes + stats.reused_bytes > 0
