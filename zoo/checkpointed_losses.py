"""Validation losses of a checkpointed transformer are kept with their graphs.

Checkpointing drops what is inside of a block, and still keeps the blocks' inputs; normalisation
layers save theirs; and the weights that both refer to change with every step. The fix: keep the
number.
"""

# holder: history

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Norm, expand, contract."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Some blocks on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(96) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)  # born
        return x


def loss_of(model: Model, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, 0)).square().mean()  # born


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history: list[torch.Tensor | float] = []
    for step in range(args.steps):
        loss = loss_of(model, torch.randn(64, 96))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        validation = loss_of(model, torch.randn(256, 96))  # born
        history.append(validation.item() if args.fixed else validation)  # kept
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"best {float(min(history)):.4f}")


if __name__ == "__main__":
    main()
