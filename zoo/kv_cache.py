"""A decoder that streams keeps its keys and values, and nobody cuts them off.

Every step attends to all that came before, so its work grows along with the cache: it looks like
inputs that get longer. The fix: a window.
"""

# holder: .memory of Stream

import argparse

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WINDOW = 64


class Stream(nn.Module):
    """Attends to its own past."""

    def __init__(self, width: int, window: int | None) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.window = window
        self.memory: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        if self.memory is not None:
            key = torch.cat([self.memory[0], key], dim=1)  # born
            value = torch.cat([self.memory[1], value], dim=1)  # born
        if self.window is not None:
            key, value = key[:, -self.window :], value[:, -self.window :]
        self.memory = key.detach().clone(), value.detach().clone()  # born, kept
        return self.out(scaled_dot_product_attention(query, key, value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Stream(64, WINDOW if args.fixed else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        x = torch.randn(8, 32, 64)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
