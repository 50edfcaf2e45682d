"""One read of the gradients that changes nothing: would a quotient overflow?

Knows tensors in groups and a divisor. Refuses to know what follows from the answer.

The read is Σx². Its root bounds every magnitude, so that in all ordinary cases one number a group decides; where it
does not (a sum that overflows float32, a scale that makes quotients larger), a second look at every quotient does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lucid.amp import _division, _norms
from lucid.amp._division import Divisor

_MARGIN = 0.999
"""Float32 sums are rounded: a bound this close to the largest number is looked at again."""


class Reading:
    """Σx² of groups of tensors, read by the host at once."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._groups = groups
        tensors = (tensor for group in groups for tensor in group)
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self._limits: list[float] = []
        self.sums = self._sum(self._limits)

    def overflows(self, divisor: Divisor) -> bool:
        """Whether a quotient of any tensor is not finite."""
        # The comparison is false for NaN too.
        if all(math.sqrt(total) <= limit * divisor.scale for total, limit in zip(self.sums, self._limits, strict=True)):
            return False
        return divisor.read(divisor.judge_quotients([tensor for group in self._groups for tensor in group]))

    def undivided(self, divisor: Divisor) -> list[Tensor]:
        """Return the tensors of the groups that have not been divided since the first read."""
        found: list[Tensor] = []
        for group, before, after in zip(self._groups, self.sums, self._sum([]), strict=True):
            if after > 0 and _nearer(after, before, before / divisor.scale / divisor.scale):
                found += group
        return found

    def _sum(self, limits: list[float]) -> list[float]:
        parts = [_norms.power(group, 2.0) for group in self._groups]
        numbers = iter(_division.numbers([part for group in parts for part in group]))
        limits += [min((torch.finfo(part.dtype).max for part in group), default=math.inf) * _MARGIN for group in parts]
        return [sum(next(numbers) for _ in group) for group in parts]


def _nearer(value: float, this: float, other: float) -> bool:
    if not other > 0:
        return True
    return abs(math.log(value / this)) < abs(math.log(value / other))
