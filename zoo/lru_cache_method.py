"""`lru_cache(maxsize=None)` on a method that computes rotary tables.

All layers of a step share one table, which is what the cache is for. But the offset into the
document is part of the key, so each step adds a new table and none ever leaves. The fix: empty the
cache when the step is over.
"""

# holder: rotary_table

import argparse
from functools import lru_cache

import torch
from torch import nn


class Rotary:
    def __init__(self, width: int) -> None:
        self.frequency = 1.0 / 10000 ** (torch.arange(0, width, 2) / width)

    @lru_cache(maxsize=None)  # noqa: B019, UP033  # kept
    def rotary_table(self, offset: int, length: int) -> torch.Tensor:
        angle = torch.arange(offset, offset + length)[:, None] * self.frequency
        return torch.polar(torch.ones_like(angle), angle)  # born


class Layer(nn.Module):
    def __init__(self, width: int, rotary: Rotary) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.rotary = rotary

    def forward(self, x: torch.Tensor, offset: int) -> torch.Tensor:
        turn = self.rotary.rotary_table(offset, x.shape[1])
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turn).flatten(-2)
        return x + self.mix(turned).tanh()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    width, length = 64, 512
    rotary = Rotary(width)
    layers = nn.ModuleList(Layer(width, rotary) for _ in range(3))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)

    for step in range(args.steps):
        x = torch.randn(1, length, width)
        h = x
        for layer in layers:
            h = layer(h, offset=step * length)
        loss = (h - x.roll(1, dims=1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.fixed:
            rotary.rotary_table.cache_clear()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
