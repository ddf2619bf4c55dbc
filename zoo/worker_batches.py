"""The hardest batches of a loader with a worker process are kept to be looked at later.

Batches arrive in memory that is shared with the worker, so each that is kept pins a mapping of its
own. The fix: keep only the last few.
"""

# holder: hard

import argparse
from collections import deque

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signals(Dataset):
    """Noise with a class in it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(1024) + index % 10, index % 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(Signals(64 * args.steps), batch_size=64, num_workers=1)
    model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hard: deque[torch.Tensor] = deque(maxlen=4 if args.fixed else None)

    for step, (x, y) in enumerate(loader):  # born
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() > 0:
            hard.append(x)  # kept
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"{len(hard)} hard batches")


if __name__ == "__main__":
    main()
