"""A small language model whose run is drawn from a seed.

What real runs mix: sentences of all lengths, gradient accumulation, evaluation now and then,
checkpoints that replace each other, generation with a key-value cache, an average of the weights, a
learning rate that warms up, dropout, a best-so-far copy. All of it is given back.
"""

import argparse
import copy
import io
import random

import torch
from torch import nn

WORDS = 200


class Attention(nn.Module):
    """Causal attention that can go on from a cache."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.project(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            cache[:] = [key, value]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    """Embeds, attends, predicts the next word."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Attention(width, 4) for _ in range(layers))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor, caches: list[list[torch.Tensor]] | None = None):
        hidden = self.embed(x)
        for i, layer in enumerate(self.layers):
            hidden = hidden + self.drop(layer(hidden, caches[i] if caches else None))
        return self.head(hidden)


def loss_of(model: Model, batch: torch.Tensor) -> torch.Tensor:
    scores = model(batch[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def generate(model: Model, length: int) -> list[int]:
    caches: list[list[torch.Tensor]] = [[] for _ in model.layers]
    words = [1]
    for _ in range(length):
        scores = model(torch.tensor([[words[-1]]]), caches)
        words.append(int(scores[0, -1].argmax()))
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="drawn from the seed if 0")
    args = parser.parse_args()

    draw = random.Random(args.seed)
    torch.manual_seed(args.seed)
    steps = args.steps or draw.randint(16, 50)
    longest = draw.choice([16, 32, 64])
    batch, accumulate = draw.choice([2, 4, 8]), draw.choice([1, 1, 1, 2, 3])
    evaluate, save, write = (draw.choice([0, 5, 8, 13, 21]) for _ in range(3))
    model = Model(draw.choice([32, 64]), draw.randint(1, 3), draw.choice([0.0, 0.1]))
    kind = draw.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
    optimizer = kind(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    average = copy.deepcopy(model) if draw.random() < 0.4 else None
    sorts = draw.random() < 0.2  # by length, as bucketed loaders do within an epoch
    best, best_state, checkpoint = float("inf"), None, None
    lengths = [draw.randint(4, longest) for _ in range(steps * accumulate)]
    epoch = draw.randint(8, 20) * accumulate
    if sorts:
        parts = [sorted(lengths[i : i + epoch]) for i in range(0, len(lengths), epoch)]
        lengths = [length for part in parts for length in part]

    for step in range(steps):
        for micro in range(accumulate):
            words = torch.randint(WORDS, (batch, lengths[step * accumulate + micro] + 1))
            (loss_of(model, words) / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=draw.random() < 0.9)
        if average is not None:
            for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(new.data, 0.05)
        if evaluate and step % evaluate == evaluate - 1:
            model.eval()
            with torch.no_grad():
                losses = [loss_of(model, torch.randint(WORDS, (16, longest))) for _ in range(3)]
            model.train()
            if (mean := torch.stack(losses).mean().item()) < best:
                best, best_state = mean, copy.deepcopy(model.state_dict())
        if save and step % save == save - 1:
            checkpoint = io.BytesIO()
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint
            )
        if write and step % write == write - 1:
            generate(model, draw.randint(5, longest))
    kept = [name for name, value in (("best", best_state), ("checkpoint", checkpoint)) if value]
    print(f"{steps} steps, kept {kept}")


if __name__ == "__main__":
    main()
