"""A metric object that is computed in every step and never reset.

`update` keeps predictions and targets because the score needs them all at once. The loop takes it
that `compute` starts anew; it does not, and the F1 of a step is that of all steps so far. The fix:
`reset()` after `compute()`.
"""

# holder: predictions

import argparse

import torch
from torch import nn


class F1:
    """The F1 score over all that was seen since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.predictions: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        self.predictions.append(prediction.detach())  # kept
        self.targets.append(target)  # kept

    def compute(self) -> float:
        positive, target = torch.cat(self.predictions) > 0.5, torch.cat(self.targets)
        hits = (positive & target).sum()
        return (2 * hits / (positive.sum() + target.sum())).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Conv1d(1, 1, 9, padding=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    metric = F1()

    for step in range(args.steps):
        signal = torch.randn(32, 1, 640)
        target = nn.functional.avg_pool1d(signal, 9, stride=1, padding=4) > 0.3  # born
        logits = model(signal)
        prediction = logits.sigmoid()  # born
        loss = nn.functional.binary_cross_entropy(prediction, target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        metric.update(prediction, target)
        f1 = metric.compute()
        if args.fixed:
            metric.reset()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} F1 {f1:.4f}")


if __name__ == "__main__":
    main()
