"""Q-learning with a bounded replay buffer, full after a third of the run and level from then on."""

import argparse
import random
from collections import deque

import torch
from torch import nn

ENVS, OBSERVATION, ACTIONS = 32, 512, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    q = nn.Sequential(nn.Linear(OBSERVATION, 64), nn.ReLU(), nn.Linear(64, ACTIONS))
    optimizer = torch.optim.AdamW(q.parameters(), lr=1e-3)
    direction = nn.functional.normalize(torch.randn(ACTIONS, OBSERVATION), dim=1)
    replay = deque(maxlen=max(1, args.steps // 3))
    observation = torch.randn(ENVS, OBSERVATION)

    for step in range(args.steps):
        with torch.no_grad():
            action = q(observation).argmax(dim=1)
        reward = (observation * direction[action]).sum(dim=1)
        following = 0.9 * observation + 0.4 * torch.randn(ENVS, OBSERVATION)
        replay.append((observation, action, reward, following))
        observation = following

        before, taken, paid, after = random.choice(replay)
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
