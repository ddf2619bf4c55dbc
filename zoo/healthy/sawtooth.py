"""Features are collected for eight steps, used for a whitening matrix, and thrown away."""

import argparse

import torch
from torch import nn

PERIOD = 8


class Whitening(nn.Module):
    """Scales features by statistics of the last full period."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.collected: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.collected.append(x.detach())
        if len(self.collected) == PERIOD:
            features = torch.cat(self.collected)
            self.mean.copy_(features.mean(dim=0))
            self.scale.copy_(features.std(dim=0).add(1e-3).reciprocal())
            self.collected.clear()
        return (x - self.mean) * self.scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), Whitening(512), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for step in range(args.steps):
        x = torch.randn(128, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
