"""A fused optimizer, which skips inside its own kernel."""

import sys

import torch
from torch import nn

torch.manual_seed(4)
model = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=5)

for _ in range(25):
    x = torch.randn(32, 12)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.float16):
        loss = (model(x).float() - x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

torch.save({"model": model.state_dict(), "scale": scaler.get_scale()}, sys.argv[1])
