"""The values of some tensors in short: how many are zero, inf or NaN, and the largest finite magnitude.

Knows tensors. Refuses to know modules. It reads: it is for the rare moment in which something went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Extent", "extent_of"]


@dataclass(frozen=True)
class Extent:
    """The values of some tensors in short.

    Attributes:
        elements: how many there are.
        zero: how many are zero.
        inf: how many are +inf or -inf.
        nan: how many are NaN.
        largest: the largest finite magnitude; 0 where there is none.
        masking: no element is +inf or NaN; what is not finite is -inf, as in an attention mask.
    """

    elements: int = 0
    zero: int = 0
    inf: int = 0
    nan: int = 0
    largest: float = 0.0
    masking: bool = True

    def joined(self, other: Extent) -> Extent:
        """The extent of both together."""
        return Extent(
            self.elements + other.elements,
            self.zero + other.zero,
            self.inf + other.inf,
            self.nan + other.nan,
            max(self.largest, other.largest),
            (self.finite or self.masking) and (other.finite or other.masking),
        )

    @property
    def finite(self) -> bool:
        """Whether every element is."""
        return not (self.inf or self.nan)

    @property
    def broken(self) -> bool:
        """Whether an element is not finite that cannot be meant so."""
        return not self.finite and not self.masking


def extent_of(tensors: Iterable[Tensor]) -> Extent:
    """The extent of the floating-point tensors among these; it waits for their device."""
    found = Extent()
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            found = found.joined(_extent(tensor.detach()))
    return found


def _extent(tensor: Tensor) -> Extent:
    largest = torch.where(torch.isfinite(tensor), tensor, 0).abs().max()
    counts = ((tensor == 0).sum(), torch.isinf(tensor).sum(), torch.isnan(tensor).sum(), torch.isneginf(tensor).sum())
    zero, inf, nan, negative = torch.stack(counts).tolist()
    return Extent(tensor.numel(), zero, inf, nan, largest.item(), inf == negative and not nan)
