"""Self-distillation whose running centre drags the teacher's graph along.

The centre of the teacher's outputs is a running average, and the teacher's outputs have a graph,
which no backward ever frees: each new centre holds the one before, and with it every pass since the
beginning. The fix: detach the outputs before they enter the average.
"""

# holder: center

import argparse
import copy

import torch
from torch import nn


class DistillationLoss(nn.Module):
    def __init__(self, width: int, fixed: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(width))
        self.fixed = fixed

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        target = ((teacher - self.center) / 0.04).softmax(dim=-1).detach()
        loss = -(target * (student / 0.1).log_softmax(dim=-1)).sum(dim=-1).mean()
        batch_center = (teacher.detach() if self.fixed else teacher).mean(dim=0)
        self.center = 0.9 * self.center + 0.1 * batch_center  # kept
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128))
    teacher = copy.deepcopy(student)
    criterion = DistillationLoss(128, args.fixed)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    for step in range(args.steps):
        image = torch.randn(128, 64)
        crops = [image + 0.3 * torch.randn(128, 64) for _ in range(2)]  # born
        loss = criterion(student(crops[0]), teacher(crops[1]))  # born
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                ours.lerp_(theirs, 0.01)
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
