"""Which gradients of a skipped step were not finite.

Knows tensors with names. Refuses to know scalers and models: why a gradient is not finite, beyond its own
numbers, is ``diagnosis``'s to tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Named(Protocol):
    """What is asked of a gradient; ``_gradients.Gradient`` is one."""

    @property
    def name(self) -> str:
        """The parameter's name, or its group and index."""

    @property
    def parameter(self) -> Tensor:
        """The parameter."""

    @property
    def tensor(self) -> Tensor:
        """The gradient's values, strided and on one device."""


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

    def __init__(self, gradients: Sequence[Named]) -> None:
        self._named = [(gradient.name, tuple(gradient.parameter.shape)) for gradient in gradients]
        self._launched = _by_device([_launched(gradient) for gradient in gradients])
        self._read: tuple[NonFinite, ...] | None = None

    def read(self) -> tuple[NonFinite, ...]:
        """Return the gradients that were not finite, in the optimizer's order; two reads a device at first."""
        if self._read is None:
            rows: dict[int, tuple[int, int, float]] = {}
            for places, counts, largest in self._launched:
                numbers = zip(places, counts.tolist(), largest.tolist(), strict=True)
                rows.update({place: (inf, nan, most) for place, (inf, nan), most in numbers})
            self._read = tuple(
                NonFinite(name, shape, *rows[place])
                for place, (name, shape) in enumerate(self._named)
                if rows[place][0] or rows[place][1]
            )
            self._launched = []
        return self._read


def count(gradients: Sequence[Named]) -> Counts:
    """Launch the counts of a skipped step; nothing is read.

    Args:
        gradients: as they are at the skip; they may change afterwards. One that has a ``scale`` (a one-element
            tensor) is told as divided by it.
    """
    with torch.no_grad():
        return Counts(gradients)


def _launched(gradient: Named) -> tuple[Tensor, Tensor]:
    """How many elements are inf and how many NaN, and the largest finite magnitude, on the gradient's device."""
    tensor = gradient.tensor
    # Without isinf and abs, which would take the gradient's size once more.
    counts = torch.stack([(tensor == math.inf).sum() + (tensor == -math.inf).sum(), (tensor != tensor).sum()])
    if not tensor.numel():
        return counts, tensor.new_zeros((), dtype=torch.float32)
    lowest, highest = tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).aminmax()
    # Float32 holds no large float64. And no -0.0.
    largest = torch.maximum(-lowest, highest).abs().to(torch.promote_types(tensor.dtype, torch.float32))
    scale = getattr(gradient, "scale", None)
    return counts, largest if scale is None else largest / scale.reshape(())


def _by_device(launched: list[tuple[Tensor, Tensor]]) -> list[tuple[list[int], Tensor, Tensor]]:
    """The places, counts and largest magnitudes of each device's gradients."""
    devices: dict[torch.device, list[int]] = {}
    for place, (counts, _) in enumerate(launched):
        devices.setdefault(counts.device, []).append(place)
    return [
        (places, torch.stack([launched[at][0] for at in places]), torch.stack([launched[at][1] for at in places]))
        for places in devices.values()
    ]
