"""What half-precision arithmetic must give: float64 on the same half operands, and how far from it is allowed.

Knows sums of products (their float64 value, the sum of the absolute values, the number of terms) and units in
the last place. Knows nothing of how the package computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Operation = Callable[..., Tensor]

HALVES = (torch.float16, torch.bfloat16)


def run(operation: Operation, operands: Sequence[Tensor], gradient: Tensor | None = None) -> list[Tensor]:
    """The output and the gradients of all operands, of leaves with the operands' values."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    output = operation(*leaves)
    seed = torch.ones_like(output) if gradient is None else gradient.to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, seed)]


def exact(operation: Operation, operands: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """The same in float64."""
    return run(operation, [operand.double() for operand in operands], gradient.double())


def magnitudes(operation: Operation, operands: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Σ|aᵢbᵢ| for each element of the output and the gradients of a sum of products."""
    return run(operation, [operand.double().abs() for operand in operands], gradient.double().abs())


def terms(operation: Operation, operands: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """How many products are summed in each element."""
    ones = [torch.ones_like(operand, dtype=torch.float64) for operand in operands]
    return run(operation, ones, torch.ones_like(gradient).double())


def allowed(value: Tensor, magnitude: Tensor, count: Tensor, half: torch.dtype) -> Tensor:
    """One half rounding of the value plus float32's bound for a sum of ``count`` products.

    The bound is n·u/(1 − n·u) times Σ|aᵢbᵢ| with u = 2⁻²⁴ (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1); products of two half values are exact in float32 but for their range.
    """
    wide = (count + 2) * 2.0**-24
    drift = wide / (1 - wide) * magnitude
    tiny = torch.finfo(half).smallest_normal * torch.finfo(half).eps / 2
    return (value.abs() + drift) * torch.finfo(half).eps / 2 + drift + tiny + 2.0**-140


def in_last_places(found: Tensor, value: Tensor, half: torch.dtype) -> Tensor:
    """The error in units in the last place of the half nearest to the value."""
    limits = torch.finfo(half)
    exponent = torch.floor(torch.log2(value.abs().clamp_min(limits.smallest_normal)))
    return (found.double() - value).abs() / (2.0**exponent * limits.eps)


def percentile(errors: Tensor) -> float:
    """The 99.9th percentile."""
    return float(torch.quantile(errors.flatten()[:10_000_000], 0.999)) if errors.numel() else 0.0
