"""Warm restarts that build a new optimizer and never let go of the old ones.

All optimizers are collected so that a checkpoint can save "the optimizers", and each brings two
moments for every parameter. The fix: the list holds the current one alone.
"""

# holder: optimizers

import argparse

import torch
from torch import nn


class Trainer:
    def __init__(self, model: nn.Module, fixed: bool) -> None:
        self.model = model
        self.fixed = fixed
        self.optimizers: list[torch.optim.Optimizer] = []

    def restart(self, lr: float) -> None:
        if self.fixed:
            self.optimizers.clear()
        self.optimizers.append(torch.optim.AdamW(self.model.parameters(), lr=lr))  # kept

    def fit_batch(self, x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer = self.optimizers[-1]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        optimizer.step()  # born
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    trainer = Trainer(model, args.fixed)

    for step in range(args.steps):
        if step % 2 == 0:
            trainer.restart(lr=1e-3 * 0.97 ** (step // 2))
        x = torch.randn(64, 128)
        loss = trainer.fit_batch(x, x.argmax(dim=1))
        if step % 20 == 0:
            print(f"step {step} loss {loss:.4f}")


if __name__ == "__main__":
    main()
