"""Four micro-batches a step, one of them with an inf in its data."""

import sys

import torch
from torch import nn

torch.manual_seed(2)
model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", growth_interval=4)

for micro in range(48):
    x, y = torch.randn(16, 10), torch.randint(3, (16,))
    if micro == 21:
        x[0, 0] = float("inf")
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x), y) / 4
    scaler.scale(loss).backward()
    if micro % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

torch.save({"model": model.state_dict(), "scale": scaler.get_scale()}, sys.argv[1])
