"""An asyncio trainer whose uploads wait for a connection that is never announced.

Each step starts a task that uploads a sample once the link is up. The link comes up, but nobody
sets the event, so the tasks wait forever, each with its sample. The fix: set the event.
"""

# holder: upload

import argparse
import asyncio

import torch
from torch import nn

uploaded = []


async def upload(sample: torch.Tensor, link_up: asyncio.Event) -> None:
    await link_up.wait()
    uploaded.append(f"{sample.mean():.4f} over {sample.numel()} pixels")


async def train(steps: int, fixed: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1024), nn.Sigmoid())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    target = torch.rand(64, 1024)
    link_up = asyncio.Event()
    background = set()

    for step in range(steps):
        sample = model(torch.randn(64, 16))  # born
        loss = (sample - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        task = asyncio.create_task(upload(sample.detach(), link_up))
        background.add(task)  # kept
        task.add_done_callback(background.discard)
        if fixed and step == 0:
            link_up.set()
        await asyncio.sleep(0)
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} uploaded {len(uploaded)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    asyncio.run(train(args.steps, args.fixed))


if __name__ == "__main__":
    main()
