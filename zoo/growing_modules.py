"""Few-shot episodes that register a fresh head each, under a fresh name.

The head is registered so that `.to()` and `.train()` reach it, and since the name has the episode's
number in it, the heads of all past episodes stay registered. The fix: one name, so that the new
head replaces the old one.
"""

# holder: episode_head

import argparse

import torch
from torch import nn

WAYS = 64


class FewShot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512))

    def new_head(self, name: str, support: torch.Tensor) -> nn.Linear:
        """A head whose weights are the means of the support set, one row a class."""
        head = nn.Linear(512, WAYS)  # born
        with torch.no_grad():
            head.weight.copy_(self.body(support).mean(dim=1))
        self.add_module(name, head)  # kept
        return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = FewShot()
    optimizer = torch.optim.AdamW(model.body.parameters(), lr=1e-3)

    for episode in range(args.steps):
        classes = torch.randn(WAYS, 1, 64)
        name = "episode_head" if args.fixed else f"episode_head{episode}"
        head = model.new_head(name, classes + 0.5 * torch.randn(WAYS, 3, 64))

        query = (classes + 0.5 * torch.randn(WAYS, 2, 64)).flatten(0, 1)
        label = torch.arange(WAYS).repeat_interleave(2)
        loss = nn.functional.cross_entropy(head(model.body(query)), label)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if episode % 20 == 0:
            print(f"episode {episode} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
