"""A custom activation that stores its output on `ctx`, in a trainer that turned the collector off.

`ctx.activated = out` makes a cycle: the output's grad_fn is the node, the node holds the output.
Backward frees only what went through `save_for_backward`, and after `gc.disable()` nobody comes for
the rest. The fix: `ctx.save_for_backward(out)`.
"""

# holder: activated
# cycle: yes

import argparse
import gc

import torch
from torch import nn


class FastTanh(torch.autograd.Function):
    """tanh whose backward reuses the output."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, fixed: bool) -> torch.Tensor:
        out = x.tanh()  # born
        if fixed:
            ctx.save_for_backward(out)
        else:
            ctx.activated = out  # kept
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        out = ctx.saved_tensors[0] if ctx.saved_tensors else ctx.activated
        return grad * (1 - out * out), None


class Net(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(48, 512)
        self.down = nn.Linear(512, 1)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(FastTanh.apply(self.up(x), self.fixed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    gc.disable()  # its pauses differ from rank to rank
    torch.manual_seed(0)
    net = Net(args.fixed)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)

    for step in range(args.steps):
        x = torch.randn(128, 48)
        loss = (net(x).squeeze(1) - x.sum(dim=1).cos()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
