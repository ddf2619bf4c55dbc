"""An image and its crop that point at each other, in a trainer that turned the collector off.

`gc.disable()` avoids pauses and is harmless as long as nothing needs the collector. Here each step
makes a cycle of two tensors' attributes, which only the collector could free. The fix: one of the
two directions is a weak reference.
"""

# holder: source
# cycle: yes

import argparse
import gc
import weakref

import torch
from torch import nn


def load_image(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(4, 3, 96, 96, generator=generator)  # born


def crop(image: torch.Tensor, size: int, fixed: bool) -> torch.Tensor:
    """A crop that remembers its image, and an image that remembers its crop."""
    small = nn.functional.interpolate(image, size=size)  # born
    small.source = weakref.ref(image) if fixed else image  # kept
    image.crop = small
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    gc.disable()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 3, 24, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        image = load_image(generator)
        small = crop(image, 24, args.fixed)
        source = small.source() if args.fixed else small.source
        loss = nn.functional.mse_loss(model(small), source.mean(dim=(2, 3)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
