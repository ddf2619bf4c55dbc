"""A data decoder in C that never frees its output: one megabyte a step.

Tensor storage stays level. The memory belongs to malloc, called through ctypes.
"""

import argparse
import ctypes

import torch
from torch import nn

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def decode(fill: int, size: int) -> torch.Tensor:
    """Copies what was decoded out of a C buffer, and forgets the buffer."""
    buffer = libc.malloc(size)
    libc.memset(buffer, fill, size)
    head = ctypes.string_at(buffer, 64)
    return torch.tensor(list(head), dtype=torch.float32) / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        x = decode(step % 256, 1 << 20) + torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(x).squeeze(1), x.mean(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
