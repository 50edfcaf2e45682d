"""What type checkers must see of the package; read by mypy and pyright in their strict modes, never run.

The specification's example, and every public name with the type that a user is to be shown.
"""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import assert_type

import lucid
import lucid.nn as nn
import lucid.nn.functional as F
import lucid.optim as optim
from lucid.amp import GradScaler, ScaleUpdate, autocast
from lucid.nn.utils import clip_grad_norm_
from lucid.optim.lr_scheduler import LRScheduler, StepLR

model = nn.Linear(4, 1).to("metal")
optimizer = optim.SGD(model.parameters(), lr=0.01)
loss_fn = nn.MSELoss()
dataloader = [(lucid.randn(8, 4, device="metal"), lucid.randn(8, 1, device="metal")) for _ in range(3)]
scaler = GradScaler()

assert_type(model, torch.nn.Linear)
assert_type(optimizer, torch.optim.SGD)
assert_type(dataloader, list[tuple[torch.Tensor, torch.Tensor]])
assert_type(lucid.float16, torch.dtype)
assert_type(lucid.GradScaler(), GradScaler)
assert_type(F.relu(dataloader[0][0]), torch.Tensor)
assert_type(lucid.__version__, str)

for x, y in dataloader:
    optimizer.zero_grad()
    with autocast():
        out = model(x)
    loss = loss_fn(out.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
    assert_type(norm, torch.Tensor)
    scaler.step(optimizer)
    scaler.update()

scheduler: LRScheduler = StepLR(optimizer, step_size=1)
if not scaler.step_was_skipped(optimizer):
    scheduler.step()

assert_type(scaler.get_scale(), float)
assert_type(scaler.is_enabled(), bool)
assert_type(scaler.step_was_skipped(optimizer), bool)
assert_type(scaler.last_update, ScaleUpdate | None)
assert_type(scaler.clip_grad_norm_(optimizer, 1.0), torch.Tensor)
if scaler.last_update is not None:
    assert_type(scaler.last_update.scale, float)
    assert_type(scaler.last_update.overflow, bool)
    assert_type(scaler.last_update.skipped, tuple[bool, ...])


def report(scaler: GradScaler, update: ScaleUpdate) -> None:
    """A hook as a user writes it."""


scaler.register_update_hook(report).remove()
scaler.load_state_dict(scaler.state_dict())


@autocast("cpu", torch.bfloat16)
def forward(inputs: torch.Tensor) -> torch.Tensor:
    """A function as a user decorates it keeps its type."""
    return inputs


assert_type(forward(dataloader[0][0]), torch.Tensor)
step: Callable[..., Any] = scaler.step
