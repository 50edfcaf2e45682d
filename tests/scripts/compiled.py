"""A compiled model, and a scaler class of the script's own."""

import sys

import torch
from torch import nn


class CountingScaler(torch.amp.GradScaler):
    """Counts its updates."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**22, growth_interval=4)
        self.count = 0

    def update(self, new_scale: float | None = None) -> None:
        """Update, and count."""
        super().update(new_scale)
        self.count += 1


torch.manual_seed(8)
model = nn.Sequential(nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 8))
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
scaler = CountingScaler()
for _ in range(16):
    x = torch.randn(8, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = (compiled(x).float() - x).abs().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
assert scaler.count == 16
torch.save({"model": model.state_dict(), "scale": scaler.get_scale()}, sys.argv[1])
