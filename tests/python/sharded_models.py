"""Models for the tests of sharding, and a step of data parallel training to compare with."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

WORDS = 31


class Block(nn.Module):
    """A residual block with an odd number of elements in nearly every parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x)))) + self.none.sum()


class Net(nn.Module):
    """Tied ends, a frozen part, blocks in a list."""

    def __init__(self, *, width: int = 17, again: bool = False, recompute: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            if self.recompute:
                h = checkpoint(block, h, use_reentrant=self.recompute == "reentrant")
            else:
                h = block(h)
        if self.again:
            h = self.blocks[0](h)
        return self.head(self.frozen(h))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batch_of(rank: int, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(WORDS, (4, 9), generator=made)


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
