"""What a rank tells the others before its own host has read it.

Knows tensors of one number each, on any devices, and the message that they are written into. Refuses to know
processes, and what the others make of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lucid.amp import _norms


class Unread(NamedTuple):
    """A verdict and a norm that wait on their devices.

    Attributes:
        doubts: flags; where none is set no quotient overflows, and the norm is right.
        powers: what the norm of scaled gradients is made of; empty where it is told otherwise, or not asked for.
        order: the order of the norm.
        scale: what the norm is divided by.
    """

    doubts: Sequence[Tensor]
    powers: Sequence[Tensor] = ()
    order: float = 2.0
    scale: float = 1.0

    @property
    def device(self) -> torch.device:
        """Where most is: the first device that is not the host and has float64."""
        devices = [tensor.device for tensor in (*self.doubts, *self.powers) if not tensor.is_cpu]
        return next((device for device in devices if device.type != "mps"), torch.device("cpu"))

    def write(self, numbers: Tensor) -> None:
        """Put a doubt into the lowest bit of the first of four int32, and the norm, a float64, into the last two."""
        if self.doubts:
            numbers[0] |= torch.stack([_on(numbers.device, flag).bool() for flag in self.doubts]).any()
        if self.powers:
            powers = torch.stack([_on(numbers.device, power).double() for power in self.powers])
            total = powers.amax() if self.order == math.inf else powers.sum()
            norm = _norms.root_of(total, self.order) / self.scale
            numbers[2:] = norm.reshape(1).view(torch.int32)


def as_one(messages: Tensor, order: float) -> Tensor:
    """Return the message that stands for several, one a row, unread.

    Its first number has all their bits, and bit 1 where their second numbers differ; its last two are the norm of all.
    """
    one = messages[0].clone()
    for message in messages[1:]:
        one[0] |= message[0]
    one[0] |= 2 * (messages[:, 1] != messages[0, 1]).any().int()
    norms = messages[:, 2:].contiguous().view(torch.float64)
    pivot = norms.amax() if order > 0 else norms.amin()
    if math.isfinite(order):
        norm = pivot * (norms / pivot).pow(order).sum().pow(1.0 / order)
        pivot = torch.where((pivot == 0.0) | pivot.isinf(), pivot, norm)
    one[2:] = pivot.reshape(1).view(torch.int32)
    return one


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    # From the host it is not waited for: the value is copied before the call returns.
    return tensor.to(device, non_blocking=tensor.is_cpu)
