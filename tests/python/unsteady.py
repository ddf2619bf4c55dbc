"""Training that is not steady, and how much a process grows by it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from torch import nn

import tenure
from offloading import batch, blocks, equal, gradients
from probes import assert_ends_well


class StepFailedError(Exception):
    pass


class Unsteady:
    """Training whose shapes change, and which fails now and then, in forward or in backward."""

    def __init__(self, device: str, **options: Any) -> None:
        self.chance = random.Random(0)
        self.device = device
        self.model: nn.Module = blocks(device=device)
        self.inputs = {rows: batch(rows, device=device) for rows in (16, 24, 32, 48, 64)}
        self.plain = {rows: gradients(self.model, x) for rows, x in self.inputs.items()}
        self.offload = tenure.Offload(self.model, min_bytes=1, **options)
        self.failures = {"forward": 0, "backward": 0}
        for layer in [*self.model.children()][1:]:  # the first one's input takes no gradient
            layer.register_forward_hook(lambda *_: self.may_fail("forward"))
            layer.register_full_backward_hook(lambda *_: self.may_fail("backward"))
        self.failing = ""

    def may_fail(self, where: str) -> None:
        if self.failing == where and self.chance.random() < 0.3:
            self.failures[where] += 1
            raise StepFailedError

    def step(self) -> None:
        rows = self.chance.choice(list(self.inputs))
        self.failing = self.chance.choice(["", "", "forward", "backward"])
        try:
            ours = gradients(self.model, self.inputs[rows], self.offload)
        except StepFailedError:
            return
        assert equal(ours, self.plain[rows])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.model.zero_grad()


def growth(target: str, steps: int) -> int:
    """Bytes by which a process that does nothing else grows, as the kernel counts them."""
    return int(
        assert_ends_well(f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from probes import resident_bytes
            from unsteady import Unsteady

            training = Unsteady("cpu", target={target!r})
            training.run(100)
            before = resident_bytes()
            training.run({steps})
            print(resident_bytes() - before)
        """)
    )
