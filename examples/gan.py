"""Two optimizers and one scaler: a small GAN in float16 learns a ring.

Each optimizer is stepped on its own merits: an overflow in one network skips that network's step only. The scale
is one for both, and moves once an iteration, after both have been stepped.
"""

import math

import torch
from torch import nn

from lucid.amp import GradScaler, autocast


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Three layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs))


def ring(number: int, device: torch.device) -> torch.Tensor:
    """Points around a circle of radius 2."""
    angle = 2 * math.pi * torch.rand(number, 1, device=device)
    return 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(number, 2, device=device)


def main() -> None:
    """Train 300 iterations of 128 points."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    generator, critic = network(4, 2).to(device), network(2, 1).to(device)
    makes = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    scaler = GradScaler(init_scale=2.0**20, growth_interval=100)
    skipped = {"generator": 0, "critic": 0}

    for step in range(301):
        noise = torch.randn(128, 4, device=device)
        with autocast(device):
            made = generator(noise)
            real, fake = critic(ring(128, device)).float(), critic(made.detach()).float()
        judges.zero_grad()
        scaler.scale((nn.functional.softplus(-real) + nn.functional.softplus(fake)).mean()).backward()
        scaler.step(judges)
        makes.zero_grad()
        with autocast(device):
            fooled = critic(made).float()
        scaler.scale(nn.functional.softplus(-fooled).mean()).backward()
        scaler.step(makes)
        scaler.update()
        skipped["critic"] += scaler.step_was_skipped(judges)
        skipped["generator"] += scaler.step_was_skipped(makes)
        if step % 100 == 0:
            radius = made.detach().float().norm(dim=1)
            print(f"step {step:3}  radius {radius.mean():.2f} ± {radius.std():.2f}  scale {scaler.get_scale():g}")
    print(f"the ring has radius 2.00 ± 0.10; skipped steps: {skipped}")


if __name__ == "__main__":
    main()
