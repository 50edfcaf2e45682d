"""How large the gradients are on their way back through the network: histograms of log₂|gradient|.

Knows how to catch the gradient that arrives at a layer's output and how to sort it by powers of two.
Refuses to know what the sizes mean, and how they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

LOWEST = -44
HIGHEST = 17
"""The first and the last power of two that have a column; what lies beyond is counted in these."""

HALF_FROM = -24
HALF_TO = 16
"""float16 holds magnitudes from 2⁻²⁴, its smallest subnormal, to just under 2¹⁶ (65504)."""


@dataclass(frozen=True)
class Histogram:
    """The magnitudes of one tensor, by powers of two.

    Attributes:
        layer: which linear layer's output this gradient arrived at, from 1.
        shares: the share of all values whose magnitude is in [2ᵉ, 2ᵉ⁺¹), for e from LOWEST to HIGHEST.
        zeros: the share that is exactly 0.
        overflowed: the share that is inf or NaN.
        middle: log₂ of the median magnitude of the values that are neither; NaN where there are none.
    """

    layer: int
    shares: tuple[float, ...]
    zeros: float
    overflowed: float
    middle: float


@contextmanager
def caught(layers: Sequence[nn.Linear], numbers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Within the scope, keep the gradient of each numbered layer's output, by number, from 1.

    The output's gradient, not the weight's, is what float16 has to carry from layer to layer: it is
    made in half precision, one value for each picture and unit.
    """
    gradients: dict[int, torch.Tensor] = {}
    handles = [layers[number - 1].register_forward_hook(partial(_keep, gradients, number)) for number in numbers]
    try:
        yield gradients
    finally:
        for handle in handles:
            handle.remove()


def histogram(layer: int, gradient: torch.Tensor) -> Histogram:
    """Sort a gradient's magnitudes into powers of two.

    Args:
        layer: the number to write on it.
        gradient: any shape, any floating dtype, at least one value.
    """
    # Every float16, bfloat16 and float32 value is a float64 with the same power of two.
    magnitudes = gradient.detach().cpu().double().abs().flatten()
    ordinary = magnitudes[torch.isfinite(magnitudes) & (magnitudes > 0)]
    # frexp gives a mantissa in [1/2, 1): the power of two below the value is one less.
    powers = (torch.frexp(ordinary).exponent - 1).clamp(LOWEST, HIGHEST)
    counts = torch.bincount(powers.long() - LOWEST, minlength=HIGHEST - LOWEST + 1)
    return Histogram(
        layer=layer,
        shares=tuple((counts / len(magnitudes)).tolist()),
        zeros=(magnitudes == 0).double().mean().item(),
        overflowed=(~torch.isfinite(magnitudes)).double().mean().item(),
        middle=ordinary.median().log2().item() if len(ordinary) else float("nan"),
    )


def _keep(
    gradients: dict[int, torch.Tensor], number: int, layer: nn.Module, args: object, output: torch.Tensor
) -> None:
    output.register_hook(partial(gradients.__setitem__, number))  # type: ignore[no-untyped-call]
