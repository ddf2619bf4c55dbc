"""Averages the last three checkpoints, and keeps every checkpoint there ever was.

Snapshots of the weights are appended to a list, and the average looks at its tail. The fix: delete
what the average no longer looks at.
"""

# holder: snapshots

import argparse
import copy

import torch
from torch import nn

WINDOW = 3


class Soup:
    """An average of a model's recent weights."""

    def __init__(self, fixed: bool) -> None:
        self.snapshots: list[dict[str, torch.Tensor]] = []
        self.fixed = fixed

    def add(self, model: nn.Module) -> None:
        self.snapshots.append(copy.deepcopy(model.state_dict()))  # born # kept
        if self.fixed:
            del self.snapshots[:-WINDOW]

    def average(self) -> dict[str, torch.Tensor]:
        recent = self.snapshots[-WINDOW:]
        return {name: sum(s[name] for s in recent) / len(recent) for name in recent[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    soup = Soup(args.fixed)

    for step in range(args.steps):
        x = torch.randn(64, 64)
        loss = (model(x) - x.sort(dim=1).values).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        soup.add(model)
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} parts {len(soup.average())}")


if __name__ == "__main__":
    main()
