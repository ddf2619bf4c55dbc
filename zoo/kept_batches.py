"""Every batch of the DataLoader is kept for a histogram at the end.

The loader makes a new tensor for each batch and would let it go; the list does not. The fix: add to
the histogram as the batches pass.
"""

# holder: seen

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Noisy templates of ten classes."""

    def __init__(self, size: int) -> None:
        self.templates = torch.randn(10, 1024)
        self.labels = torch.randint(10, (size,))
        self.noise = torch.randn(64, 1024)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = int(self.labels[index])
        return self.templates[label] + self.noise[index % 64], label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    batch = 64
    loader = DataLoader(Digits(batch * args.steps), batch_size=batch, shuffle=True)
    model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    histogram = torch.zeros(20)
    seen = []

    for step, (x, y) in enumerate(loader):  # born
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.fixed:
            histogram += torch.histc(x, bins=20, min=-5, max=5)
        else:
            seen.append((x, y))  # kept
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    for x, _ in seen:
        histogram += torch.histc(x, bins=20, min=-5, max=5)
    print(f"most pixels in bin {histogram.argmax().item()}")


if __name__ == "__main__":
    main()
