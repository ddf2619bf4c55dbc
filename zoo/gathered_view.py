"""Home-made parameter sharding in which releasing a gathered weight frees nothing.

The shards are gathered into a padded flat buffer, and the layer computes with a view of the true
shape. The view is cached under the shards' version so that micro-batches share it; `release` drops
the flat buffer, but each step's view goes on pinning it. The fix: release the cached view as well.
"""

# holder: views

import argparse

import torch
from torch import nn

WORLD = 3


class ShardedLinear(nn.Module):
    """A linear layer that is stored as one shard per rank and gathered for use."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        weight = torch.randn(n_out, n_in) / n_in**0.5
        self.shape, self.numel = weight.shape, weight.numel()
        padding = -self.numel % WORLD
        flat = nn.functional.pad(weight.flatten(), (0, padding))
        self.shards = nn.ParameterList([shard.clone() for shard in flat.chunk(WORLD)])
        self.gathered: torch.Tensor | None = None
        self.views: dict[int, torch.Tensor] = {}

    def gather(self) -> torch.Tensor:
        version = self.shards[0]._version  # changes when the optimizer has stepped
        if version not in self.views:
            self.gathered = torch.cat(list(self.shards))  # born
            self.views[version] = self.gathered[: self.numel].view(self.shape)  # kept
        return self.views[version]

    def release(self) -> None:
        self.gathered = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.gather())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = [ShardedLinear(64, 257), ShardedLinear(257, 257), ShardedLinear(257, 10)]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    teacher = nn.Linear(64, 10)

    for step in range(args.steps):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for _ in range(2):
            x = torch.randn(32, 64)
            loss = loss + nn.functional.cross_entropy(model(x), teacher(x).argmax(dim=1)) / 2
        loss.backward()
        optimizer.step()
        for layer in layers:
            layer.release()
            if args.fixed:
                layer.views.clear()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
