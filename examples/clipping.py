"""Clip gradients in float16: by two calls that PyTorch users know, or by one that does both.

Until it is unscaled a gradient is ``scale`` times too large, so that clipping it earlier would clip everything.
"""

from collections.abc import Callable

import torch
from torch import nn

from lucid.amp import GradScaler, autocast

MAX_NORM = 1.0
Clip = Callable[[GradScaler, torch.optim.Optimizer, nn.Module], torch.Tensor]


def unscale_then_clip(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.Tensor:
    """Two calls; between them the gradients hold their true values, to be looked at or changed."""
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def at_once(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.Tensor:
    """One call, which reads and writes the gradients once less."""
    return scaler.clip_grad_norm_(optimizer, MAX_NORM)


def not_at_all(scaler: GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.Tensor:
    """The norm alone, for comparison."""
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def train(clip: Clip) -> tuple[float, float]:
    """Fit a line to data with wild outliers; return the distance from the truth and the largest norm."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    truth = torch.randn(16, 1, device=device)
    model = nn.Linear(16, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(init_scale=2.0**8)
    norms = []
    for _ in range(200):
        x = torch.randn(32, 16, device=device)
        noise = torch.distributions.StudentT(1.5).sample((32, 1)).to(device)
        optimizer.zero_grad()
        with autocast(device):
            out = model(x)
        scaler.scale(nn.functional.mse_loss(out.float(), x @ truth + noise)).backward()
        norms.append(clip(scaler, optimizer, model).item())
        scaler.step(optimizer)
        scaler.update()
    return (model.weight - truth.T).norm().item(), max(norms)


if __name__ == "__main__":
    for clip in (not_at_all, unscale_then_clip, at_once):
        error, largest = train(clip)
        print(f"{clip.__name__:17}  error of the weights {error:6.3f}  largest true norm {largest:7.1f}")
