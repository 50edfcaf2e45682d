"""A model that is averaged, copied and saved whole while it trains."""

import copy
import io
import sys

import torch
from torch import nn

torch.manual_seed(10)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
kept, best = [], float("inf")
for step in range(12):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    average.update_parameters(model)
    if step % 4 == 3:
        kept.append(copy.deepcopy(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert torch.equal(again(x), model(x))
        copied = copy.deepcopy(scaler)
        assert copied.get_scale() == scaler.get_scale()

with torch.no_grad():
    for one in kept:
        best = min(best, nn.functional.mse_loss(one(x), x).item())
state = {**model.state_dict(), **{f"average.{name}": value for name, value in average.state_dict().items()}}
torch.save({"model": {**state, "best": torch.tensor(best)}, "scale": scaler.get_scale()}, sys.argv[1])
