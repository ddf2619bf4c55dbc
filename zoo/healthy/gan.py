"""A GAN: two optimizers that step in turn, and a generator step through a frozen critic."""

import argparse

import torch
from torch import nn
from torch.nn.functional import softplus

NOISE, PIXELS = 32, 256


def real_images(count: int) -> torch.Tensor:
    """Stripes of random phase."""
    phase = torch.rand(count, 1) * 6.28
    return (torch.arange(PIXELS) * 0.2 + phase).sin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 256), nn.ReLU(), nn.Linear(256, PIXELS), nn.Tanh())
    critic = nn.Sequential(nn.Linear(PIXELS, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))

    for step in range(args.steps):
        fake = generator(torch.randn(64, NOISE))

        critic_optimizer.zero_grad()
        on_real, on_fake = critic(real_images(64)), critic(fake.detach())
        critic_loss = softplus(-on_real).mean() + softplus(on_fake).mean()
        critic_loss.backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        critic.requires_grad_(False)
        generator_loss = softplus(-critic(fake)).mean()
        generator_loss.backward()
        critic.requires_grad_(True)
        generator_optimizer.step()
        if step % 20 == 0:
            print(f"step {step} critic {critic_loss.item():.4f} loss {generator_loss.item():.4f}")


if __name__ == "__main__":
    main()
