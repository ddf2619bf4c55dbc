"""Gradient accumulation: four micro-batches to a step, gradients set to None after it."""

import argparse

import torch
from torch import nn

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        total = torch.zeros(())
        for _ in range(MICRO_BATCHES):
            x = torch.randn(32, 64)
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"step {step} loss {total.item():.4f}")


if __name__ == "__main__":
    main()
