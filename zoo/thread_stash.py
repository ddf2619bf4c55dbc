"""A prefetch thread with a pool of scratch buffers in thread-local storage.

Each used buffer goes back to the thread's own stash, but a new one is made all the same: the stash
is filled and never emptied. The fix: take a buffer from the stash when there is one.
"""

# holder: stash

import argparse
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

local = threading.local()


def take_buffer(shape: tuple[int, ...], fixed: bool) -> torch.Tensor:
    if not hasattr(local, "stash"):
        local.stash = []
    if fixed and local.stash:
        return local.stash.pop()
    return torch.empty(shape)  # born


def give_back(buffer: torch.Tensor) -> None:
    local.stash.append(buffer)  # kept


def augment(image: torch.Tensor, fixed: bool) -> torch.Tensor:
    """Runs on the prefetch thread."""
    noise = take_buffer(image.shape, fixed)
    noise.normal_(std=0.1)
    augmented = image + noise
    give_back(noise)
    return augmented


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    images = torch.randn(4, 64, 1024)
    model = nn.Sequential(nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as prefetch:
        upcoming = prefetch.submit(augment, images[0], args.fixed)
        for step in range(args.steps):
            x = upcoming.result()
            upcoming = prefetch.submit(augment, images[(step + 1) % 4], args.fixed)
            loss = (model(x) - images[step % 4]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
