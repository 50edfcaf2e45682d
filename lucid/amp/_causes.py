"""Which gradients of a skipped step were not finite.

Knows tensors with names. Refuses to know scalers and models: why a gradient is not finite, beyond its own
numbers, is ``diagnosis``'s to tell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lucid.amp import _torch

_SMALL = 2**12
"""Elements of a gradient up to which it shares its launches with others."""

_TOGETHER = 2**18
"""Elements of gradients that share them, at most: their workspace is some 10 MiB."""


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
        self._launched = list(_launched(gradients))
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


def _launched(gradients: Sequence[Named]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """The places, counts (inf and NaN, a row each) and largest finite magnitudes of each device's gradients."""
    devices: dict[torch.device, list[tuple[list[int], Tensor, Tensor]]] = {}
    for places in _groups(gradients):
        group = [gradients[place] for place in places]
        counts, largest = _counted([one.tensor for one in group])
        scales = [scale.reshape(()) for one in group if (scale := getattr(one, "scale", None)) is not None]
        if scales:  # PyTorch keeps one scale, on whichever device its first loss was; the CPU must wait until it comes
            largest = largest / torch.stack(scales).to(largest.device, non_blocking=not largest.is_cpu)
        devices.setdefault(counts.device, []).append((places, counts, largest))
    for groups in devices.values():
        every_place, counts_of_all, largest_of_all = zip(*groups, strict=True)
        yield list(itertools.chain(*every_place)), torch.cat(counts_of_all), torch.cat(largest_of_all)


def _groups(gradients: Sequence[Named]) -> Iterator[list[int]]:
    """The places of gradients that are looked at together: small ones of one device and dtype, each large one alone."""
    small: dict[tuple[object, ...], list[int]] = {}
    held: dict[tuple[object, ...], int] = {}
    for place, gradient in enumerate(gradients):
        tensor = gradient.tensor
        if tensor.numel() > _SMALL:
            yield [place]
            continue
        kind = (tensor.device, tensor.dtype, hasattr(gradient, "scale"))
        held[kind] = held.get(kind, 0) + tensor.numel()
        if held[kind] > _TOGETHER:
            yield small.pop(kind)
            held[kind] = tensor.numel()
        small.setdefault(kind, []).append(place)
    yield from small.values()


def _counted(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """How many elements of each are inf and how many NaN, a row each, and their largest finite magnitudes."""
    if len(tensors) > 1 or not tensors[0].numel():
        return _counted_together(tensors)
    (tensor,) = tensors
    # Without isinf and abs, which would take the gradient's size once more.
    counts = torch.stack([(tensor == math.inf).sum() + (tensor == -math.inf).sum(), (tensor != tensor).sum()])
    lowest, highest = tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).aminmax()
    # And no -0.0.
    largest = torch.maximum(-lowest, highest).abs().to(_told_in(tensor))
    return counts.reshape(1, 2), largest.reshape(1)


def _counted_together(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same of many small tensors of one device and dtype, a row each, in launches that they share."""
    sizes = torch.tensor([tensor.numel() for tensor in tensors], device="cpu")
    values = _torch.joined(tensors)
    owners = torch.arange(len(tensors), device="cpu").repeat_interleave(sizes).to(values.device, non_blocking=True)
    kinds = torch.stack([values.abs() == math.inf, values != values], dim=1).long()
    counts = kinds.new_zeros(len(tensors), 2).index_add_(0, owners, kinds)
    finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().to(_told_in(values))
    return counts, finite.new_zeros(len(tensors)).scatter_reduce_(0, owners, finite, "amax")


def _told_in(tensor: Tensor) -> torch.dtype:
    """The dtype of a largest magnitude: float32 holds no large float64."""
    return torch.promote_types(tensor.dtype, torch.float32)
