"""A gradient probe whose hook refers to the very tensor it hangs on.

The hook compares the gradient with the activation, so its closure holds the activation; the
activation's graph holds the hook. The graph's side of that cycle is C++, where the garbage
collector does not look, and so each step's activation stays. The fix: let the hook close over
`features.detach()`, which has no graph.
"""

# holder: probe
# cycle: yes

import argparse

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 512)
        self.head = nn.Linear(512, 10)
        self.fixed = fixed
        self.ratio = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.encoder(x).relu()  # born
        reference = features.detach() if self.fixed else features

        def probe(grad: torch.Tensor) -> None:
            self.ratio = (grad.norm() / reference.norm()).item()

        features.register_hook(probe)  # kept
        return self.head(features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier(args.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        x = torch.randn(128, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} gradient/activation {model.ratio:.2e}")


if __name__ == "__main__":
    main()
