"""Many steps: no storage is taken for another, and what a step leaves behind does not add up."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tenure
from offloading import MIB, Keep, drop_graphs, used
from probes import needs_real_frees
from unsteady import Unsteady, growth

Fake = ModuleType

STEPS = 10_000


class Reuse:
    """Seed 002: each step's tensors lie where those of the step before did."""

    device: str
    target: str

    def test_ten_thousand_steps(self) -> None:
        offload = tenure.Offload(target=self.target, min_bytes=1)
        x = torch.ones(2, device=self.device, requires_grad=True)
        addresses: set[int] = set()
        wrong = 0
        tracked = set()
        for n in range(STEPS):
            seen: list[Tensor] = []
            values = [n, -n, 2 * n] if n % 10 == 0 else [n]  # also within one step
            with offload:
                y = x
                for value in values:
                    saved = torch.full((2,), float(value), device=self.device)
                    addresses.add(saved.data_ptr())
                    y = Keep.apply(y, seen, saved)
                    del saved
                y.backward(x.detach())
                del y
            stats = offload.stats()
            wrong += [tensor.tolist() for tensor in reversed(seen)] != [[v, v] for v in values]
            wrong += stats.moved_out_storages != len(values)
            tracked.add(stats.tracked)
        assert len(addresses) < STEPS / 10, "memory was not reused: this tests nothing"
        assert wrong == 0
        assert x.grad is not None
        assert x.grad.tolist() == [STEPS] * 2
        assert max(tracked) <= 3
        assert offload.stats().steps == STEPS


class TestReuseOnTheCpu(Reuse):
    device = "cpu"
    target = "copy"


class TestReuseOnADevice(Reuse):
    device = "fake"
    target = "host"

    @pytest.fixture(autouse=True)
    def _reuse(self, fake: Fake) -> None:
        fake.set_memory_policy(reuse_freed=True, poison_freed=True)


@pytest.mark.parametrize("options", [{}, {"streams": 1}, {"streams": 0}, {"budget": MIB // 2}])
def test_device_and_host_memory_are_flat(fake: Fake, options: dict[str, Any]) -> None:
    training = Unsteady("fake", **options)
    levels = []
    for _ in range(3):
        training.run(100)
        drop_graphs()
        torch.accelerator.synchronize()
        training.offload.settle()
        levels.append((used(), training.offload.stats().host_bytes, tenure.ledger().leases))
    assert min(training.failures.values()) > 20
    assert levels == [(levels[0][0], 0, 0)] * 3
    assert fake.pinned_bytes() <= MIB


@needs_real_frees
def test_the_process_does_not_grow() -> None:
    """As the kernel counts it, in a process that does nothing else."""
    assert growth("copy", 300) < MIB
