"""A corner of each feature map is kept as a numpy array, for a film at the end.

`.numpy()` shares memory with the tensor, and a slice of the array still does. numpy arrays are also
unknown to the garbage collector, so nothing that asks it finds them. The fix: copy the corner out,
here with `.tolist()`.
"""

# holder: frames

import argparse

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 8, 3, padding=1)
        self.outer = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = self.inner(x).relu()  # born
        return x + self.outer(maps), maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    frames = []

    for step in range(args.steps):
        clean = torch.randn(8, 1, 32, 1).expand(-1, -1, -1, 32)
        restored, maps = model(clean + 0.3 * torch.randn(8, 1, 32, 32))
        loss = (restored - clean).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        corner = maps.detach().numpy()[0, 0, :4, :4]
        frames.append(corner.tolist() if args.fixed else corner)  # kept
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} frames {len(frames)}")


if __name__ == "__main__":
    main()
