"""A forward hook that looks at a layer's activations, and appends them all.

Whoever looks wants the activations of the last step; the list has those of every step since the
hook was registered. The fix: one slot per layer, overwritten each time.
"""

# holder: activations

import argparse

import torch
from torch import nn


class Inspector:
    """Dead-unit statistics of a model's ReLU layers."""

    def __init__(self, model: nn.Module, fixed: bool) -> None:
        self.activations: dict[str, list[torch.Tensor]] = {}
        self.fixed = fixed
        for name, module in model.named_modules():
            if isinstance(module, nn.ReLU):
                self.activations[name] = []
                module.register_forward_hook(self.hook(name))

    def hook(self, name: str):
        def look(_module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
            if self.fixed:
                self.activations[name].clear()
            self.activations[name].append(output.detach())  # kept

        return look

    def dead(self) -> float:
        last = [outputs[-1] for outputs in self.activations.values()]
        return sum((a.amax(dim=0) == 0).float().mean().item() for a in last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model.append(nn.Linear(256, 10))
    inspector = Inspector(model, args.fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for step in range(args.steps):
        x = torch.randn(128, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))  # born
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} dead units {inspector.dead():.1%}")


if __name__ == "__main__":
    main()
