"""A cache of masks by length that fills while lengths are new, and then only hits.

There are as many lengths as a third of the steps, so it is filled by then.
"""

import argparse
from functools import cache

import torch
from torch import nn


@cache
def causal_mask(length: int) -> torch.Tensor:
    return torch.full((length, length), float("-inf")).triu(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    qkv, out = nn.Linear(32, 96), nn.Linear(32, 32)
    optimizer = torch.optim.AdamW([*qkv.parameters(), *out.parameters()], lr=1e-3)
    lengths = torch.randperm(max(1, args.steps // 3)) + 160

    for step in range(args.steps):
        length = int(lengths[step % len(lengths)])
        x = torch.randn(2, length, 32)
        q, k, v = qkv(x).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(length))
        loss = (out(mixed) - x.roll(1, dims=1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} length {length} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
