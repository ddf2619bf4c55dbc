"""Weights are copied to numpy in every step for a plot of their drift: one megabyte a step.

The copies are numpy's own memory, so no tensor storage is held.
"""

import argparse

import numpy as np
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drift: list[np.ndarray] = []

    for step in range(args.steps):
        x = torch.randn(32, 512)
        loss = (model(x) - x.flip(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights = [p.detach().numpy().ravel() for p in model.parameters()]
        drift.append(np.concatenate(weights))
        if step % 20 == 0:
            moved = float(np.linalg.norm(drift[-1] - drift[0]))
            print(f"step {step} loss {loss.item():.4f} moved {moved:.4f}")


if __name__ == "__main__":
    main()
