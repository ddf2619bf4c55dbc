"""One row of the attention matrix is kept per step, and with it the whole matrix.

A slice is a view: however small, it keeps the storage that it looks into. The fix: copy the row
out, here with `.tolist()`.
"""

# holder: last_rows

import argparse

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qk = nn.Linear(width, 2 * width)
        self.value = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self.qk(x).chunk(2, dim=-1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)  # born
        return weights @ self.value(x), weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = SelfAttention(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    last_rows = []

    for step in range(args.steps):
        x = torch.randn(4, 192, 32)
        out, weights = model(x)
        loss = (out - x.cumsum(dim=1) / 10).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        row = weights.detach()[0, -1, :16]
        last_rows.append(row.tolist() if args.fixed else row)  # kept
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} peak {max(last_rows[-1]):.4f}")


if __name__ == "__main__":
    main()
