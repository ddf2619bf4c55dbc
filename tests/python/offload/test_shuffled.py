"""Whole steps on a device whose streams run late and in random order: gradients stay right.

Freed memory is poisoned and reused at once, so that one missing fence is a wrong gradient sooner or
later. test_races.py has a test for each fence by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed as dist

import tenure
from offloading import (
    Context,
    batch,
    blocks,
    equal,
    gradients,
    grads_of,
    peak_of,
    side_streams,
    tell,
)

Fake = ModuleType

STREAMS = pytest.mark.parametrize("streams", [0, 1, 2])
ROWS = (24, 32, 40)


def middle_budget(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Between what a step needs with everything on the host and with nothing there."""
    offload = tenure.Offload(model, min_bytes=1)
    low = min(peak_of(lambda: gradients(model, x, offload)) for _ in range(3))
    return (low + peak_of(lambda: gradients(model, x))) // 2


@STREAMS
@pytest.mark.parametrize("budget", [False, True], ids=["all", "budget"])
def test_steps_of_one_shape(fake: Fake, streams: Any, budget: bool) -> None:
    tell(fake)
    model, x = blocks(layers=4, device="fake"), batch(64, device="fake")
    plain = gradients(model, x)
    most = middle_budget(model, x) if budget else None
    fake.set_memory_policy(poison_freed=True, reuse_freed=True)
    offload = tenure.Offload(model, streams=streams, budget=most, min_bytes=1)
    for seed in range(25):
        fake.shuffle(seed)
        assert equal(gradients(model, x, offload), plain), f"seed {seed}"
    stats = offload.stats()
    assert (stats.mode, stats.moved_out_bytes > 0) == ("planned", True)
    assert budget == ("fits the budget" in stats.kept)


@STREAMS
def test_steps_of_changing_shapes_with_odd_endings(fake: Fake, streams: Any) -> None:
    """No plan, so copies run as far behind as they like; graphs that are dropped, kept, reused."""
    model = blocks(layers=4, device="fake")
    inputs = {rows: batch(rows, device="fake") for rows in ROWS}
    plain = {rows: gradients(model, x) for rows, x in inputs.items()}
    fake.set_memory_policy(poison_freed=True, reuse_freed=True)
    offload = tenure.Offload(model, streams=streams, min_bytes=1)
    chance = random.Random(streams)
    modes = set()
    for seed in range(60):
        fake.shuffle(seed)
        rows = chance.choice(ROWS)
        ending = chance.choice(["plain", "twice", "dropped", "late"])
        model.zero_grad()
        with offload:
            loss = model(inputs[rows]).square().sum()
            if ending == "twice":
                loss.backward(retain_graph=True)
                model.zero_grad()
            if ending == "dropped":
                dropped = model(inputs[chance.choice(ROWS)])
                del dropped
            if ending != "late":
                loss.backward()
        if ending == "late":
            loss.backward()
        assert equal(grads_of(model), plain[rows]), f"seed {seed}, {rows} rows, {ending}"
        modes.add(offload.stats().mode)
        del loss
    assert "following" in modes


@STREAMS
def test_streams_that_the_model_itself_has(fake: Fake, streams: Any) -> None:
    """Two halves of a model on two streams, joined as one joins them without Offload."""

    class TwoStreams(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = blocks(device="fake"), blocks(layers=2, device="fake")
            self.side = fake.new_stream()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            main = torch.accelerator.current_stream()
            self.side.wait_stream(main)
            with self.side:
                right = self.right(x)
            left = self.left(x)
            main.wait_stream(self.side)
            return left * right

    model, x = TwoStreams(), batch(device="fake")
    plain = gradients(model, x)
    fake.set_memory_policy(poison_freed=True, reuse_freed=True)
    offload = tenure.Offload(model, streams=streams, min_bytes=1)
    for seed in range(15):
        fake.shuffle(seed)
        assert equal(gradients(model, x, offload), plain), f"seed {seed}"
    assert offload.stats().moved_out_bytes > 0


@STREAMS
@pytest.mark.parametrize("budget", [False, True], ids=["all", "budget"])
def test_the_host_never_waits_for_the_device(fake: Fake, streams: Any, budget: bool) -> None:
    """In no step, with every copy as late as can be."""
    tell(fake)
    model, x = blocks(layers=4, device="fake"), batch(64, device="fake")
    most = middle_budget(model, x) if budget else None
    offload = tenure.Offload(model, streams=streams, budget=most, min_bytes=1)
    modes = []
    for _ in range(5):
        model.zero_grad()
        for stream in side_streams(fake):
            fake.hold(stream)
        before = fake.waits().host
        with offload:
            model(x).square().sum().backward()
        assert fake.waits().host == before
        modes.append(offload.stats().mode)
        torch.accelerator.synchronize()
    assert set(modes) == {"measuring", "planned"}
    assert offload.stats().moved_in_bytes > 0


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@STREAMS
def test_a_strict_pipeline_counts_what_is_on_its_way(fake: Fake, streams: Any) -> None:
    """As if it were there, however late copies are: the bound is that of steps without Offload."""

    def peak_and_bound(context: Context) -> tuple[int, int]:
        model, x = blocks(layers=4, width=128, device="fake"), batch(512, 128, device="fake")
        loss = torch.nn.functional.mse_loss
        pipe = tenure.Pipeline(model, "gpipe", 4, loss=loss, strict=True)
        target = torch.zeros_like(x)
        for seed in range(10):
            fake.shuffle(seed)
            model.zero_grad()
            with context:
                pipe.step(x, target=target)
        return pipe.stats().peak_bytes, pipe.bound().bytes

    plain, bound = peak_and_bound(nullcontext())
    offload = tenure.Offload(torch.nn.Module(), streams=streams, min_bytes=1)
    ours, same = peak_and_bound(offload)
    assert same == bound
    assert ours < plain / 2
    assert offload.stats().mode == "planned"
