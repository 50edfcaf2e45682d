"""The plain loop: scale, step, update, from a scale that is too high at first."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=6)
x, y = torch.randn(64, 16), torch.randint(4, (64,))

for _ in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

torch.save({"model": model.state_dict(), "scale": scaler.get_scale()}, sys.argv[1])
