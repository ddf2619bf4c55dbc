"""A home-made activation offloader that knows a tensor by its address.

What autograd saves is copied to the host and filed under `data_ptr()`. Addresses come back, so each
address has a list of copies, and a handle is an index into it; nothing is ever taken out, because
that would shift the other indices. The fix: forget all copies when the next step's forward begins.
"""

# holder: copies

import argparse
from collections import defaultdict

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class HostOffload(saved_tensors_hooks):
    """Keeps what autograd saves on the host between forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self.pack, self.unpack)
        self.copies: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.parameters = {p.data_ptr() for p in model.parameters()}

    def pack(self, tensor: torch.Tensor):
        address = tensor.data_ptr()
        if tensor.numel() < 4096 or address in self.parameters:
            return tensor
        host = tensor.detach().to("cpu", copy=True)  # born
        self.copies[address].append(host)  # kept
        return address, len(self.copies[address]) - 1, tensor.device

    def unpack(self, packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        address, index, device = packed
        return self.copies[address][index].to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 64),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = HostOffload(model)

    for step in range(args.steps):
        if args.fixed:
            offload.copies.clear()
        x = torch.randn(128, 64)
        with offload:
            loss = (model(x) - x.roll(1, dims=1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
