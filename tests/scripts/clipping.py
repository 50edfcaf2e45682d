"""Gradients unscaled and clipped, with dropout and options from the command line."""

import argparse

import torch
from torch import nn


def main() -> None:
    """Train, with what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    options = parser.parse_args()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.named_parameters(), lr=options.lr)
    scaler = torch.GradScaler("cpu", init_scale=2.0**20, growth_interval=8)
    for _ in range(25):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "scale": scaler.get_scale()}, options.out)


if __name__ == "__main__":
    main()
