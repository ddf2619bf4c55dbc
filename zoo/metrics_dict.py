"""A metrics dictionary that keeps the model's output of every step.

The outputs were meant for an accuracy at the end of the epoch, and the epoch is long. The fix:
reduce each output to the number that is wanted, and keep that.
"""

# holder: metrics

import argparse

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    metrics = {"loss": [], "output": [], "accuracy": []}

    for step in range(args.steps):
        image = torch.rand(8, 1, 32, 32)
        classes = (image.squeeze(1) * 12).long()
        output = model(image)  # born
        loss = nn.functional.cross_entropy(output, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        metrics["loss"].append(loss.item())
        if args.fixed:
            metrics["accuracy"].append((output.argmax(1) == classes).float().mean().item())
        else:
            metrics["output"].append(output)  # kept
        if step % 20 == 0:
            print(f"step {step} loss {metrics['loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
