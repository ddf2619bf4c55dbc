"""An exponential moving average of the weights, replaced out of place in every step.

The averages are new tensors each time, so nothing old survives, but nothing is reused in place
either. The model is evaluated with them every ten steps.
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    val_x = torch.randn(256, 64)
    val_y = val_x[:, :10].argmax(dim=1)

    for step in range(args.steps):
        x = torch.randn(64, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            average = {
                name: 0.95 * average[name] + 0.05 * p for name, p in model.named_parameters()
            }
            if step % 10 == 0:
                logits = functional_call(model, average, val_x)
                val_loss = nn.functional.cross_entropy(logits, val_y)
                print(f"step {step} loss {loss.item():.4f} averaged {val_loss.item():.4f}")


if __name__ == "__main__":
    main()
