"""Layers are unfrozen one after the other, so gradients and moments come in three stairs.

The last layer to be unfrozen is so by the middle of the run.
"""

import argparse

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    model.requires_grad_(False)
    frozen = list(layers)
    optimizer = torch.optim.AdamW(frozen.pop().requires_grad_(True).parameters(), lr=1e-3)
    stair = max(1, args.steps // 4)

    for step in range(args.steps):
        if frozen and step > 0 and step % stair == 0:
            optimizer.add_param_group({"params": frozen.pop().requires_grad_(True).parameters()})
        x = torch.randn(64, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} frozen {len(frozen)}")


if __name__ == "__main__":
    main()
