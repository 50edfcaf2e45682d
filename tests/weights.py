"""One weight and its optimizer, trained or about to be: what tests of the whole scaler begin with."""

from typing import Any

import torch

from lucid.amp import GradScaler


def trained(*gradients: float, scaler: GradScaler | None = None) -> tuple[GradScaler, list[float]]:
    """A weight that descends by these true gradients, one iteration each; the scales after each update."""
    scaler = scaler or GradScaler()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scales = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scaler, scales


def sgd(gradient: float = 12.0, **settings: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A weight with a gradient, and its optimizer."""
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), gradient)
    return weight, torch.optim.SGD([weight], lr=1.0, **settings)
