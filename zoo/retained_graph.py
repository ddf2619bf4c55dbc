"""Two losses over one body, both with `retain_graph=True`, and a curve of their sum.

The first backward has to retain the graph, the second one was copied from it. The sums are kept for
a plot, and since no backward ever freed what the graph saved, each holds the step's activations.
The fix: let the last backward free the graph, and keep `.item()`.
"""

# holder: points

import argparse

import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 128), nn.SiLU())
        self.classify = nn.Linear(128, 10)
        self.reconstruct = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)  # born
        return self.classify(h), self.reconstruct(h)  # born


class Curve:
    """What the plot will show."""

    def __init__(self) -> None:
        self.points = []

    def add(self, value) -> None:
        self.points.append(value)  # kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = Curve()

    for step in range(args.steps):
        x = torch.randn(128, 64)  # born
        label = x[:, :10].argmax(dim=1)  # born
        logits, restored = model(x)
        class_loss = nn.functional.cross_entropy(logits, label)  # born
        restore_loss = nn.functional.mse_loss(restored, x)

        optimizer.zero_grad()
        class_loss.backward(retain_graph=True)
        restore_loss.backward(retain_graph=not args.fixed)
        optimizer.step()

        total = class_loss + restore_loss
        curve.add(total.item() if args.fixed else total)
        if step % 20 == 0:
            print(f"step {step} loss {total.item():.4f}")


if __name__ == "__main__":
    main()
