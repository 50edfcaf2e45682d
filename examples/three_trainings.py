"""Three trainings to look at with ``lucid-amp run``; docs/reports.md reads their reports.

``lucid-amp run examples/three_trainings.py well``: float16 with a scaler, as it should be
``lucid-amp run examples/three_trainings.py huge``: now and then a row of data is a thousand times too large
``lucid-amp run examples/three_trainings.py plain``: float32, no scaler: would float16 work?
"""

import sys

import torch
from torch import nn


class Square(nn.Module):
    """A squared ReLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x², or 0 where x is negative."""
        positive = nn.functional.relu(x)
        return positive * positive  # autocast computes square() in float32 on some devices


def model_for(kind: str) -> nn.Module:
    """A deep net of sigmoids, whose gradients are small, for ``plain``; else a net of squared ReLUs."""
    if kind == "plain":
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
        return nn.Sequential(*layers, nn.Linear(64, 10))
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), Square())]
    return nn.Sequential(*layers[2:], nn.Linear(64, 10))


def main(kind: str) -> None:
    """Learn to tell which of ten groups of inputs is the largest."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = model_for(kind).to(device)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    scaler = None if kind == "plain" else torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=60)
    for step in range(300):
        x = torch.randn(64, 64, device=device)
        y = x[:, :60].unflatten(1, (10, 6)).sum(2).argmax(1)
        if kind == "huge" and step % 90 == 80:
            x[7] *= 1000.0
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16, enabled=kind != "plain"):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
