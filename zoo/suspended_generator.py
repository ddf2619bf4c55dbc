"""Readers that are left in the middle of their block of data.

Only the first windows of each block are trained on, so that blocks get mixed; the readers are kept
to go on with in the next epoch. A generator that waits at its `yield` keeps its local variables, so
each reader keeps its block. The fix: `close()` the reader; the next epoch opens it anew.
"""

# holder: readers

import argparse
from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn

WINDOW = 64


def windows(block_id: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows of one block, and the value that follows each."""
    noise = torch.Generator().manual_seed(block_id)
    phase = torch.rand(32, 1, generator=noise) * 6.28
    block = (torch.arange(4096) * 0.1 + phase).sin()  # born
    for start in range(0, block.shape[1] - WINDOW, WINDOW):
        end = start + WINDOW
        yield block[:, start:end], block[:, end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WINDOW, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    readers = []

    for step in range(args.steps):
        reader = windows(block_id=step)
        readers.append(reader)  # kept
        optimizer.zero_grad()
        for x, y in islice(reader, 4):
            loss = (model(x).squeeze(1) - y).pow(2).mean()
            (loss / 4).backward()
        optimizer.step()
        if args.fixed:
            reader.close()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
