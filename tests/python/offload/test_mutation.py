"""A saved tensor that was written to: an error, as PyTorch's own check gives without hooks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenure
from offloading import Keep

Fake = ModuleType

PHRASE = "one of the variables needed for gradient computation has been modified by an inplace"


def backward_fails(loss: Tensor, *expected: str) -> None:
    with pytest.raises(tenure.MutationError, match=PHRASE) as error:
        loss.backward()
    assert isinstance(error.value, RuntimeError)
    for text in expected:
        assert text in str(error.value)


class OnBoth:
    device: str
    target: str

    def offload(self, **options: Any) -> tenure.Offload:
        return tenure.Offload(target=self.target, **({"min_bytes": 1} | options))

    def leaf(self) -> Tensor:
        return torch.ones(8, 32, device=self.device, requires_grad=True)

    def test_what_was_moved(self) -> None:
        with self.offload():
            y = self.leaf() * 2
            z = y.sin()
            y.add_(1)
            backward_fails(z.sum(), "Float [8, 32] is at version 1; expected version 0 instead")

    def test_an_output(self) -> None:
        with self.offload():
            y = (self.leaf() * 2).exp()
            y.mul_(3)
            backward_fails(y.sum(), "version 1; expected version 0")

    def test_through_a_view_of_it(self) -> None:
        with self.offload():
            y = self.leaf() * 2
            z = y[1:].sin()
            y.view(-1)[-1] = 0
            backward_fails(z.sum(), "Float [7, 32]")

    def test_after_the_device_has_let_it_go(self) -> None:
        """Someone else's view of the saved storage lives on, and is written to."""
        offload = self.offload()
        with offload:
            y = self.leaf() * 2
            z = y.sin()
            view = y[0]
            del y
            offload.settle()
            view.detach().zero_()
            backward_fails(z.sum())

    def test_what_was_kept_because_others_hold_it(self) -> None:
        held = torch.ones(8, 32, device=self.device)
        offload = self.offload()
        for _ in range(2):
            with offload:
                Keep.apply(self.leaf(), [], held).sum().backward()
        assert "held by others anyway" in offload.stats().kept
        with offload:
            loss = Keep.apply(self.leaf(), [], held).sum()
            held.add_(1)
            backward_fails(loss)

    def test_a_parameter(self) -> None:
        layer = nn.Linear(32, 32).to(self.device)
        offload = self.offload()
        with offload:
            loss = layer(self.leaf()).sum()
            with torch.no_grad():
                layer.weight.add_(1)
            backward_fails(loss)
        assert offload.stats().kept["parameters and buffers"][0] > 0

    def test_what_is_too_small_to_move(self) -> None:
        with self.offload(min_bytes="1MiB"):
            y = self.leaf() * 2
            z = y.sin()
            y.add_(1)
            backward_fails(z.sum())

    def test_after_the_block(self) -> None:
        with self.offload():
            y = self.leaf() * 2
            z = y.sin()
        y.add_(1)
        backward_fails(z.sum())

    def test_between_two_backwards(self) -> None:
        with self.offload():
            y = self.leaf() * 2
            z = y.sin().sum()
            z.backward(retain_graph=True)
            y.add_(1)
            backward_fails(z)

    def test_writing_before_it_is_saved_is_no_error(self) -> None:
        with self.offload():
            x = self.leaf()
            y = x * 2
            y.add_(1)
            y.sin().sum().backward()
        assert x.grad is not None
        expected = 2 * torch.cos(torch.full((8, 32), 3.0))
        assert torch.equal(x.grad.cpu(), expected)


class TestOnTheCpu(OnBoth):
    device = "cpu"
    target = "copy"

    def test_what_is_no_plain_tensor(self) -> None:
        with self.offload():
            x = torch.ones(4, 4, requires_grad=True)
            sparse = (x * 2).to_sparse()
            loss = torch.sparse.mm(sparse, x).sum()
            with torch.no_grad():
                sparse.mul_(2)
            backward_fails(loss)


@pytest.mark.usefixtures("fake")
class TestOnADevice(OnBoth):
    device = "fake"
    target = "host"
