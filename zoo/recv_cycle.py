"""A pipeline stage that leaks its receive buffer in every step.

The stage receives into a leaf, and a hook on that leaf sends the gradient back. The hook mentions
the received activation, whose graph leads through IRecv to AccumulateGrad and so to the leaf, which
owns the hook: a cycle through autograd's C++ that the garbage collector cannot see. The fix: give
the hook a detached activation, which knows the shape but not the graph.
"""

# holder: send_back
# cycle: yes

import argparse
from queue import SimpleQueue

import torch
from torch import nn


class IRecv(torch.autograd.Function):
    """Fills `buffer` with what the previous stage sent."""

    @staticmethod
    def forward(_ctx, buffer: torch.Tensor, link: SimpleQueue) -> torch.Tensor:
        return buffer.copy_(link.get())

    @staticmethod
    def backward(_ctx, grad: torch.Tensor):
        return grad, None


def receive(shape: torch.Size, forward: SimpleQueue, backward: SimpleQueue, fixed: bool):
    buffer = torch.empty(shape, requires_grad=True)  # born
    activation = IRecv.apply(buffer, forward)
    like = activation.detach() if fixed else activation

    def send_back(leaf: torch.Tensor) -> None:
        backward.put(leaf.grad.view_as(like))
        leaf.grad = None

    buffer.register_post_accumulate_grad_hook(send_back)  # kept
    return activation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(64, 512), nn.ReLU())
    last = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.05)
    forward, backward = SimpleQueue(), SimpleQueue()

    for step in range(args.steps):
        x, y = torch.randn(128, 64), torch.randint(10, (128,))
        sent = first(x)
        forward.put(sent.detach())

        received = receive(sent.shape, forward, backward, args.fixed)
        loss = nn.functional.cross_entropy(last(received), y)
        loss.backward()

        sent.backward(backward.get())
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
