"""Train a small network in float16: the loop that most programs need.

Only the three lines with ``scaler`` and the one with ``autocast`` differ from a float32 loop.
"""

import math

import torch
from torch import nn

from lucid.amp import GradScaler, autocast


def main() -> None:
    """Fit two periods of a sine."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    x = torch.linspace(-math.pi, math.pi, 256, device=device).unsqueeze(1)
    y = torch.sin(2 * x)

    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler()
    skipped = 0

    for step in range(301):
        optimizer.zero_grad()
        with autocast(device):
            out = model(x)
            loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.step_was_skipped(optimizer)
        if step % 100 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}  scale {scaler.get_scale():g}")

    print(f"the forward pass ran in {out.dtype}, the weights are {model[0].weight.dtype}, {skipped} steps skipped")


if __name__ == "__main__":
    main()
