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


class Attention(nn.Module):
    """Causal, of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Attention and two linear layers, each with its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small one, with tied ends."""

    def __init__(self, *, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.at = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(GPTBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.at(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


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
