"""Compiled modules: entered outside of the compiled call, gradients are those without Offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenure
from offloading import Context, batch, blocks, equal, gradients, grads_of


class Residual(nn.Module):
    """Compiled in part: the tensor between the parts is saved by both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.outer = blocks(layers=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(x)
        z = self.compiled(y)
        return y.exp() * z * y.sin()

    def compiled(self, y: Tensor) -> Tensor:
        return (self.layer(y).exp() * y.cos()).tanh()


@pytest.fixture(autouse=True)
def _compile_anew() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(model, backend=backend)


def test_a_compiled_model() -> None:
    model, x = blocks(), batch()
    fast = compiled(model)
    plain = gradients(fast, x)
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    for _ in range(4):
        assert equal(gradients(fast, x, offload), plain)
    stats = offload.stats()
    assert stats.mode == "planned"
    assert stats.moved_out_bytes > 0
    assert stats.kept["parameters and buffers"][0] > 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_part_of_a_model(backend: str) -> None:
    model, x = Residual(), batch()
    model.compiled = compiled(model.compiled, backend)  # type: ignore[method-assign]
    plain = gradients(model, x)
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    for _ in range(4):
        assert equal(gradients(model, x, offload), plain)
    assert offload.stats().moved_out_bytes > 0


def test_several_forwards_before_their_backwards() -> None:
    model, x = blocks(), batch()
    fast = compiled(model)

    def step(context: Context) -> list[Tensor]:
        model.zero_grad()
        with context:
            losses = [fast(x * n).square().sum() for n in (1, 2, 3)]
            for loss in losses:
                loss.backward()
        return grads_of(model)

    offload = tenure.Offload(model, target="copy", min_bytes=1)
    plain = step(torch.enable_grad())
    for _ in range(3):
        assert equal(step(offload), plain)
