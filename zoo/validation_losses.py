"""Validation losses collected for a plot, each with the graph that made it.

There is no `no_grad` around the validation pass, and no backward either that would free what its
graph saved, so every entry of the list keeps all activations of that pass. The fix: append
`loss.item()`.
"""

# holder: val_losses

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
model.append(nn.Linear(256, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

truth = torch.randn(32, 1)
train_x = torch.randn(2048, 32)
train_y = (train_x @ truth).sin()
val_x = torch.randn(256, 32)
val_y = (val_x @ truth).sin()
val_losses = []

for step in range(args.steps):
    picked = torch.randint(len(train_x), (64,))
    optimizer.zero_grad()
    loss = criterion(model(train_x[picked]), train_y[picked])
    loss.backward()
    optimizer.step()

    val_loss = criterion(model(val_x), val_y)  # born
    val_losses.append(val_loss.item() if args.fixed else val_loss)  # kept
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} validation {float(val_losses[-1]):.4f}")

print(f"best validation loss {float(min(val_losses)):.4f}")
