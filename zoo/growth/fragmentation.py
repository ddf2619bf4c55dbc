"""Samples get longer and fewer while packet headers settle between them: the heap falls to pieces.

A step always has the same number of values, so live tensor bytes stay level. But after each sample
malloc places a packet that is cut down to its header and kept, so the holes that samples leave are
a little too small for the next step's samples, and malloc takes new memory instead.
"""

import argparse

import torch
from torch import nn

VALUES = 256 * 1024
HEADER = 600


def pack(sample: torch.Tensor) -> bytearray:
    """A header, and the sample's bytes after it."""
    payload = memoryview(sample.numpy()).cast("B")
    packet = bytearray(HEADER + payload.nbytes)
    packet[:HEADER] = f"{tuple(sample.shape)} {sample.dtype}".ljust(HEADER).encode()
    packet[HEADER:] = payload
    return packet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    headers: list[bytearray] = []

    for step in range(args.steps):
        length = 4096 + 64 * step
        samples = []
        for _ in range(VALUES // length):
            sample = torch.frombuffer(bytearray(4 * length), dtype=torch.float32).normal_()
            packet = pack(sample)
            del packet[HEADER:]  # shrinks in place
            samples.append(sample)
            headers.append(packet)

        x = torch.stack([sample.view(-1, 64).std(dim=0) for sample in samples])
        loss = (model(x).squeeze(1) - x.amax(dim=1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} length {length} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
