"""A learning-rate schedule, a checkpoint in the middle, and a scaler that goes on from it."""

import io
import sys

import torch
from torch import nn


def build() -> tuple:
    """Everything that a run consists of."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ELU(), nn.Linear(12, 6))
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, optimizer, schedule, torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=3)


def train(model, optimizer, schedule, scaler) -> None:  # noqa: ANN001
    """Ten steps."""
    for _ in range(10):
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.smooth_l1_loss(model(x).float(), x.flip(1))
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()


torch.manual_seed(5)
first = build()
train(*first)
checkpoint = io.BytesIO()
torch.save([part.state_dict() for part in first], checkpoint)
checkpoint.seek(0)
second = build()
for part, state in zip(second, torch.load(checkpoint), strict=True):
    part.load_state_dict(state)
train(*second)
torch.save({"model": second[0].state_dict(), "scale": second[3].get_scale()}, sys.argv[1])
