"""A dataset that remembers each sample it has decoded, in a DataLoader's worker process.

The worker lives as long as the loader and grows by about half a megabyte a batch; the process that
trains stays level.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Decoded(Dataset):
    """Samples decoded on demand, with a cache that is never hit: no index comes twice."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cache: dict[int, tuple[np.ndarray, str]] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index not in self.cache:
            pixels = np.random.default_rng(index).standard_normal((64, 64))
            self.cache[index] = (pixels, f"sample {index}")
        pixels, _ = self.cache[index]
        return pixels[::8, ::8].astype(np.float32).ravel(), int(pixels[0, 0] > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Decoded(16 * args.steps)
    loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
