"""Random programs of layers, operators, writes and saved parts: gradients are plain PyTorch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from fitting import Job, same_as_plain

WIDTH, ROWS, LENGTH = 64, 4, 32
Op = Callable[["Program", Tensor, Tensor], Tensor]


class Gated(torch.autograd.Function):
    """Saves an input twice removed from what it is made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        gate = torch.tanh(x)
        ctx.save_for_backward(gate, y)
        return gate * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, y = ctx.saved_tensors
        return grads[0] * y * (1 - gate * gate), grads[0] * gate


def halves(_: Program, a: Tensor, _b: Tensor) -> Tensor:
    left, right = a.chunk(2, -1)
    return torch.cat([F.silu(left) * right, right], -1)


def pieces(_: Program, a: Tensor, b: Tensor) -> Tensor:
    one, two, three = b.split([16, 16, 32], -1)
    return torch.cat([three, torch.sigmoid(one) * two, one], -1) + a


def added_in_place(_: Program, a: Tensor, b: Tensor) -> Tensor:
    out = a * 1.5
    return out.add_(b)


def multiplied_in_place(_: Program, a: Tensor, b: Tensor) -> Tensor:
    out = a + 1
    return out.mul_(torch.sigmoid(b))


def written_by_slices(_: Program, a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    out[..., :32] = a[..., :32]
    out[..., 32:] = torch.tanh(b[..., 32:])
    return out


def without_gradient(_: Program, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        weights = torch.softmax(b, -1)
    return a * weights


def in_bfloat16(of: Program, a: Tensor, _b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = of.linear(a)
    return out.float()


def checkpointed(of: Program, a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda x, y: F.gelu(of.linear(x)) * y, a, b, use_reentrant=False)
    return out


def over_time(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2)).transpose(1, 2)


OPS: list[Op] = [
    halves,
    pieces,
    added_in_place,
    multiplied_in_place,
    written_by_slices,
    without_gradient,
    in_bfloat16,
    checkpointed,
    lambda of, a, _b: of.linear(a),
    lambda of, a, _b: F.gelu(of.linear(a)),
    lambda of, a, _b: F.relu_(of.linear(a)),
    lambda of, a, _b: of.norm(a),
    lambda of, a, _b: of.rms(a),
    lambda of, a, _b: over_time(of.batch_norm, a),
    lambda of, a, _b: over_time(of.conv, a),
    lambda of, a, _b: of.recurrent(a)[0],
    lambda of, a, b: of.attention(a, b, b, need_weights=False)[0],
    lambda of, a, _b: of.dropout(a),
    lambda _, a, b: F.scaled_dot_product_attention(a, b, a),
    lambda _, a, b: torch.baddbmm(a, a @ a.transpose(1, 2), b),
    lambda _, a, b: Gated.apply(a, b),
    lambda _, a, b: a * b,
    lambda _, a, b: a + b,
    lambda _, a, b: a * b.detach() + b,
    lambda _, a, b: a / (b.abs() + 1),
    lambda _, a, b: torch.where(a > 0, a, b),
    lambda _, a, b: a.masked_fill(b > 0.5, 0.0),
    lambda _, a, b: torch.logsumexp(a, -1, keepdim=True) + b,
    lambda _, a, b: a.sort(-1)[0] * b,
    lambda _, a, b: a.amax(-1, keepdim=True) * b,
    lambda _, a, _b: torch.softmax(a, -1),
    lambda _, a, _b: torch.exp(-a.square()),
    lambda _, a, _b: F.normalize(a, dim=-1),
    lambda _, a, _b: a - a.mean(-1, keepdim=True),
    lambda _, a, _b: a.cumsum(1) * 0.1,
    lambda _, a, _b: a.view(ROWS, -1, 16, 4).transpose(2, 3).reshape(a.shape).flip(1),
]


class Program(nn.Module):
    """Each operator takes two of the values before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.batch_norm, self.conv = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        chance = random.Random(seed)
        self.lines = [
            (chance.choice(OPS), chance.random(), chance.random())
            for _ in range(chance.randrange(4, 16))
        ]

    def forward(self, x: Tensor) -> Tensor:
        values = [x, self.first(x)]
        for op, a, b in self.lines:
            values.append(op(self, values[int(a * len(values))], values[int(b * len(values))]))
        means = [value.mean() for value in [values[1], *values[-3:]]]
        return torch.stack(means).sum()


def program(seed: int) -> Job:
    model = Program(seed)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return Job(model, lambda n: model(x + n))


@pytest.mark.parametrize("seed", range(40))
def test_gradients_are_those_of_a_plain_step(seed: int) -> None:
    same_as_plain(lambda: program(seed), part=0.0 if seed % 2 else 0.3)
