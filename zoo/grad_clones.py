"""Gradients are cloned in every step to estimate their noise, and all clones are kept.

The estimate needs no more than the norm of each step's gradient and a running mean. The fix: keep
the norm.
"""

# holder: grad_history

import argparse

import torch
from torch import nn


class NoiseScale:
    """How much gradients differ from step to step."""

    def __init__(self, model: nn.Module, fixed: bool) -> None:
        self.model = model
        self.fixed = fixed
        self.grad_history = []

    def record(self) -> None:
        if self.fixed:
            norms = [p.grad.norm() for p in self.model.parameters()]
            self.grad_history.append(torch.stack(norms).norm().item())
            return
        grads = [p.grad.clone() for p in self.model.parameters()]  # born
        self.grad_history.append(grads)  # kept

    def last_norm(self) -> float:
        last = self.grad_history[-1]
        return last if self.fixed else torch.stack([g.norm() for g in last]).norm().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model.append(nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    noise = NoiseScale(model, args.fixed)

    for step in range(args.steps):
        x = torch.randn(64, 128)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        noise.record()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} gradient norm {noise.last_norm():.4f}")


if __name__ == "__main__":
    main()
