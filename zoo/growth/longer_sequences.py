"""A curriculum: sequences are a little longer in every step, and so is what a step needs.

Nothing is kept from one step to the next; the work itself grows.
"""

import argparse

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    embed, head = nn.Embedding(128, 64), nn.Linear(64, 128)
    block = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(embed, block, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        length = 32 + 4 * step
        tokens = (torch.randint(128, (4, 1)) + torch.arange(length + 1)) % 128
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} length {length} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
