"""Accumulate gradients over micro-batches in float16: one step, one update for all of them.

The scale must not move between the micro-batches whose gradients are added up, so ``step`` and ``update`` come
once for each large batch. One micro-batch that overflows makes the sum overflow, and the whole step is skipped.
"""

import torch
from torch import nn

from lucid.amp import GradScaler, autocast

MICRO_BATCHES = 4


def gradients(model: nn.Module) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main() -> None:
    """Train on batches of 128 that are seen 32 at a time."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    teacher = nn.Linear(16, 1).to(device).requires_grad_(False)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(init_scale=2.0**12)

    for step in range(101):
        x = torch.randn(128, 16, device=device)
        y = teacher(x)
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for part, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
            with autocast(device):
                out = model(part)
            loss = nn.functional.mse_loss(out.float(), target) / MICRO_BATCHES
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        if step % 50 == 0:
            accumulated = gradients(model)
            at_once = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
            exact = torch.cat([gradient.flatten() for gradient in at_once])
            error = (accumulated - exact).norm() / exact.norm()
            print(f"step {step:3}  loss {total:.4f}  from the float32 gradient of the whole batch: {error:.2%}")
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()
