"""Training losses collected for an average, each with the graph that backward has been through.

`backward()` frees what the graph saved, so nothing large stays: only the graph's nodes, some
hundred bytes each. A deep model has thousands of them, and the list keeps those of every step. The
fix: append `loss.detach()`.
"""

# holder: losses

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.mix(self.norm(x))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), *[Block(32) for _ in range(12)], nn.Linear(32, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth = torch.randn(16, 1)
    losses = []
    for step in range(args.steps):
        x = torch.randn(64, 16)
        loss = criterion(model(x), (x @ truth).sin())  # born
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() if args.fixed else loss)  # kept
        if step % 20 == 0:
            print(f"step {step} mean loss {sum(losses).item() / len(losses):.4f}")


main()
