"""A custom softmax over groups that stores a view of its output on `ctx`.

The view leads to its base, the output, whose grad_fn is the node, which holds the view. The step
from a view to its base is C++, so this cycle is beyond the garbage collector and stays for good.
The fix: `ctx.save_for_backward(out)`, and take the view again in backward.
"""

# holder: shares
# cycle: yes

import argparse

import torch
from torch import nn

GROUPS = 8


class GroupedSoftmax(torch.autograd.Function):
    """Softmax within each of the groups of the last dimension."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, fixed: bool) -> torch.Tensor:
        out = torch.empty_like(x)  # born
        shares = out.view(len(x), GROUPS, -1)
        torch.softmax(x.view_as(shares), dim=-1, out=shares)
        if fixed:
            ctx.save_for_backward(out)
        else:
            ctx.shares = shares  # kept
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        if ctx.saved_tensors:
            shares = ctx.saved_tensors[0].view(len(grad), GROUPS, -1)
        else:
            shares = ctx.shares
        pull = grad.view_as(shares)
        inner = pull - (pull * shares).sum(dim=-1, keepdim=True)
        return (shares * inner).view_as(grad), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    up, down = nn.Linear(64, 512), nn.Linear(512, 10)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=1e-2)

    for step in range(args.steps):
        x = torch.randn(128, 64)
        routed = GroupedSoftmax.apply(up(x), args.fixed)
        loss = nn.functional.cross_entropy(down(routed), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
