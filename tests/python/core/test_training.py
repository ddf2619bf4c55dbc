"""A thousand steps of a real training loop that fails at random points: nothing is left of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

import tenure
from probes import needs_real_frees, resident_bytes

STEPS = 1000
WARM_UP = 200
MIB = 1 << 20


class StepFailedError(Exception):
    pass


@dataclass
class Training:
    """A small model whose forward and backward hooks hold what they see, and may raise."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    failures: Counter[str] = field(default_factory=Counter)
    taken: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.GELU(),
            torch.nn.Linear(128, 128),
            torch.nn.GELU(),
            torch.nn.Linear(128, 8),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.held: list[tenure.Lease] = []
        for name, layer in self.model.named_children():
            layer.register_forward_hook(
                lambda _module, _inputs, output, name=name: self.see(name, output)
            )
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=name: self.hold("accumulated", parameter.grad, name)
            )

    def may_fail(self, where: str) -> None:
        if self.chance.random() < 0.02:
            self.failures[where] += 1
            raise StepFailedError(where)

    def hold(self, where: str, tensor: torch.Tensor, name: str) -> None:
        """Some leases are kept, some released, some dropped; the scope ends what is left."""
        kind = "activation" if where == "forward" else "gradient"
        lease = tenure.hold(tensor, name, kind=kind)
        self.taken += 1
        self.may_fail(where)
        if self.chance.random() < 0.7:
            self.held.append(lease)
        elif self.chance.random() < 0.5:
            lease.release()

    def see(self, name: str, output: torch.Tensor) -> None:
        self.hold("forward", output, name)
        output.register_hook(lambda grad: self.hold("backward", grad, name))

    def step(self, n: int) -> None:
        with tenure.scope("step", n, on_close="release"):
            inputs, targets = torch.randn(32, 64), torch.randint(8, (32,))
            for half in range(2):
                with tenure.scope("microbatch", half, on_close="release"):
                    part = slice(16 * half, 16 * half + 16)
                    outputs = self.model(inputs[part])
                    loss = torch.nn.functional.cross_entropy(outputs, targets[part])
                    loss.backward()
            self.may_fail("optimizer")
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, steps: range) -> None:
        for n in steps:
            try:
                self.step(n)
            except StepFailedError:
                self.optimizer.zero_grad()
            self.held.clear()


@dataclass
class Result:
    training: Training
    leases: int
    bytes: int
    grown: int


@pytest.fixture(scope="module")
def result() -> Iterator[Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on layers this small more threads only wait for each other
    training = Training()
    training.run(range(WARM_UP))
    before = resident_bytes()
    training.run(range(WARM_UP, WARM_UP + STEPS))
    ledger = tenure.ledger()
    yield Result(training, ledger.leases, ledger.bytes, resident_bytes() - before)
    torch.set_num_threads(threads)


def test_it_failed_everywhere_it_could(result: Result) -> None:
    """Or the two tests below would say less than they seem to."""
    assert result.training.taken > 10 * STEPS
    assert set(result.training.failures) == {"forward", "backward", "accumulated", "optimizer"}
    assert min(result.training.failures.values()) > 10


def test_the_ledger_is_empty(result: Result) -> None:
    assert (result.leases, result.bytes) == (0, 0)


@needs_real_frees
def test_memory_is_flat(result: Result) -> None:
    # The smallest activation held is 512 bytes; a step holds over 20 of them, 100 KiB in all. A
    # leak of one page in four steps would be seen.
    assert result.grown < MIB
