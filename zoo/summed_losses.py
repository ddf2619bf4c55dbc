"""A meter that adds up losses as tensors, and so chains the graphs of all steps together.

`backward()` has freed what the graphs saved, and the sum is a single number; but it was computed,
and its graph leads to the graph of every loss that ever went into it. The fix: add up
`loss.item()`.
"""

# holder: total

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total = self.total + value  # born, kept
        self.count += 1

    def mean(self):
        return float(self.total) / self.count


def main():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth = torch.randn(16, 1)
    meter = Meter()
    for step in range(args.steps):
        x = torch.randn(64, 16)
        loss = criterion(model(x), (x @ truth).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item() if args.fixed else loss)
        if step % 20 == 0:
            print(f"step {step} mean loss {meter.mean():.4f}")


main()
