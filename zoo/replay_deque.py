"""A replay buffer that is a deque without `maxlen`.

Transitions are sampled from the newest few, and nothing drops the old ones. The fix: `maxlen`.
"""

# holder: replay

import argparse
import random
from collections import deque

import torch
from torch import nn

ENVS, OBSERVATION, ACTIONS = 64, 512, 4


class Corridor:
    """Many copies of a toy environment that pays for walking along a hidden direction."""

    def __init__(self) -> None:
        self.direction = nn.functional.normalize(torch.randn(ACTIONS, OBSERVATION), dim=1)
        self.state = torch.randn(ENVS, OBSERVATION)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reward = (self.state * self.direction[action]).sum(dim=1)
        self.state = 0.9 * self.state + 0.4 * torch.randn_like(self.state)  # born
        return self.state, reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    env = Corridor()
    q = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.ReLU(), nn.Linear(64, ACTIONS))
    optimizer = torch.optim.AdamW(q.parameters(), lr=1e-3)
    replay = deque(maxlen=8 if args.fixed else None)
    observation = env.state

    for step in range(args.steps):
        with torch.no_grad():
            action = q(observation).argmax(dim=1)
        following, reward = env.step(action)
        replay.append((observation, action, reward, following))  # kept
        observation = following

        before, taken, paid, after = random.choice(list(replay)[-8:])
        with torch.no_grad():
            target = paid + 0.9 * q(after).amax(dim=1)
        loss = nn.functional.smooth_l1_loss(q(before).gather(1, taken[:, None]).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} reward {reward.mean().item():.4f}")


if __name__ == "__main__":
    main()
