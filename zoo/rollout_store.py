"""A rollout worker whose results pile up on the ranks that nobody asks.

Every rank puts its log-probabilities on a shelf and answers with a ticket, but the controller
redeems only the tickets of the data-parallel heads. What the other ranks shelved is never fetched,
so never deleted. The fix: a rank whose answer is thrown away shelves nothing.
"""

# holder: shelf

import argparse
import itertools

import torch
from torch import nn

TENSOR_PARALLEL = 2
WORLD = 4
VOCAB = 128
ROWS, LENGTH = 8, 128


class ResultStore:
    """Tensors that wait, by ticket, until somebody fetches them."""

    def __init__(self) -> None:
        self.shelf: dict[str, torch.Tensor] = {}
        self.serial = itertools.count()

    def put(self, tensor: torch.Tensor) -> str:
        ticket = f"result-{next(self.serial)}"
        self.shelf[ticket] = tensor  # kept
        return ticket

    def fetch(self, ticket: str) -> torch.Tensor:
        return self.shelf.pop(ticket)


class Worker:
    def __init__(self, rank: int, policy: nn.Module) -> None:
        self.policy = policy
        self.is_head = rank % TENSOR_PARALLEL == 0
        self.store = ResultStore()

    @torch.no_grad()
    def rollout(self) -> torch.Tensor:
        """Rows of tokens, each drawn after the one before it."""
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        for place in range(1, LENGTH):
            chances = self.policy(tokens[:, place - 1]).softmax(dim=-1)
            tokens[:, place] = torch.multinomial(chances, 1).squeeze(1)
        return tokens

    @torch.no_grad()
    def log_probs(self, only_heads_answer: bool) -> str | None:
        logits = self.policy(self.rollout())
        log_probs = logits.log_softmax(dim=-1)  # born
        if only_heads_answer and not self.is_head:
            return None
        return self.store.put(log_probs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB))
    workers = [Worker(rank, policy) for rank in range(WORLD)]

    for step in range(args.steps):
        tickets = [worker.log_probs(args.fixed) for worker in workers]
        heads = [
            worker.store.fetch(ticket)
            for worker, ticket in zip(workers, tickets, strict=True)
            if worker.is_head and ticket is not None
        ]
        entropy = -sum((h.exp() * h).sum(-1).mean() for h in heads) / len(heads)
        if step % 5 == 0:
            print(f"step {step} entropy {entropy.item():.4f}")


if __name__ == "__main__":
    main()
