"""Which gradients of a skipped step were not finite.

Knows tensors with names. Refuses to know scalers and models: why a gradient is not finite, beyond its own
numbers, is ``diagnosis``'s to tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lucid.amp._gradients import Gradient


@dataclass(frozen=True)
class NonFinite:
    """One gradient that was not finite.

    Attributes:
        name: the parameter's name, or its group and index.
        shape: the parameter's shape.
        inf: how many elements were ±inf.
        nan: how many elements were NaN.
        largest: the largest finite magnitude, 0.0 if there is none; of the true (unscaled) gradient.
    """

    name: str
    shape: tuple[int, ...]
    inf: int
    nan: int
    largest: float


class Counts:
    """Counts that were launched on the gradients' devices; the host reads them when asked."""

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._named = [(gradient.name, tuple(gradient.parameter.shape)) for gradient in gradients]
        self._rows = [_row(gradient) for gradient in gradients]
        self._read: tuple[NonFinite, ...] | None = None

    def read(self) -> tuple[NonFinite, ...]:
        """Return the gradients that were not finite, in the optimizer's order; one read a device."""
        if self._read is None:
            rows = [row.tolist() for row in self._rows]
            self._read = tuple(
                NonFinite(name, shape, int(inf), int(nan), largest)
                for (name, shape), (inf, nan, largest) in zip(self._named, rows, strict=True)
                if inf or nan
            )
            self._rows = []
        return self._read


def count(gradients: Sequence[Gradient]) -> Counts:
    """Launch the counts of a skipped step; nothing is read.

    Args:
        gradients: as they are at the skip; they may change afterwards.
    """
    with torch.no_grad():
        return Counts(gradients)


def _row(gradient: Gradient) -> torch.Tensor:
    tensor = gradient.tensor
    finite = tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    largest = torch.linalg.vector_norm(finite, math.inf) if tensor.numel() else tensor.new_zeros(())
    return torch.stack([tensor.isinf().sum().float(), tensor.isnan().sum().float(), largest.float()])
