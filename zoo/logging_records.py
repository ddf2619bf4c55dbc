"""Debug records with tensors as arguments, held back until an error happens.

A `MemoryHandler` keeps the last ten thousand records and writes them only if the run goes wrong. A
record keeps its arguments, because it is formatted when it is written. The fix: log numbers, not
tensors.
"""

# holder: buffer

import argparse
import logging
import logging.handlers

import torch
from torch import nn

log = logging.getLogger("train")
log.setLevel(logging.DEBUG)
log.propagate = False
log.addHandler(
    logging.handlers.MemoryHandler(
        capacity=10_000,
        flushLevel=logging.ERROR,
        target=logging.StreamHandler(),
        flushOnClose=False,
    )
)


class AutoEncoder(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 512), nn.ReLU())
        self.decode = nn.Linear(512, 64)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.encode(x)  # born
        if self.fixed:
            log.debug("mean code %.4f", code.mean().item())
        else:
            log.debug("code %s", code.detach())  # kept
        return self.decode(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = AutoEncoder(args.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        x = torch.randn(128, 64)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
