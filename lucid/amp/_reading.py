"""One read of the gradients that changes nothing: would a quotient overflow?

Knows tensors in groups and a divisor. Refuses to know what follows from the answer.

The read is Σx². Its root bounds every magnitude, so that in all ordinary cases one number a bucket decides; where it
does not (a sum that overflows float32, a scale that makes quotients larger), a second look at every quotient does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lucid.amp import _division, _norms, _torch
from lucid.amp._division import DIVIDES_IN, Divisor
from lucid.amp._torch import Bucket

_LIMITS = {dtype: torch.finfo(dtype).max * 0.999 for dtype in (torch.float32, torch.float64)}
"""Sums are rounded: a bound this close to the largest number is looked at again."""

_ROUNDING = 0.01
"""So far apart, in logarithms, two sums of the same numbers stay: float32 and any order of adding."""


class Reading:
    """Σx² of buckets of tensors of one device and dtype each; the host reads all of them at once, once it must."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._buckets = [bucket for group in groups for bucket in _torch.by_device_and_dtype(list(group))]
        self._largest: list[Tensor | None] | None = None
        self.device = next((device for device, _, _ in self._buckets), torch.device("cpu"))
        self._powers = _norms.power(self._buckets, 2.0)
        self._sums: list[float] | None = None

    @property
    def sums(self) -> list[float]:
        """Σx² of each bucket."""
        if self._sums is None:
            self._sums = _division.numbers(self._powers)
        return self._sums

    def doubts(self, divisor: Divisor) -> list[Tensor]:
        """Return a flag a bucket, which nobody has read: whether the sum is 0, or leaves an overflow open.

        Where no flag is set, ``remember`` needs no sum.
        """
        limits = [_LIMITS[DIVIDES_IN[dtype]] * divisor.scale for _, dtype, _ in self._buckets]
        return [
            _norms.exceeds(power, 2.0, limit) | (power == 0.0)
            for power, limit in zip(self._powers, limits, strict=True)
        ]

    def overflows(self, divisor: Divisor) -> bool:
        """Whether a quotient of any tensor is not finite."""
        limits = [_LIMITS[DIVIDES_IN[dtype]] for _, dtype, _ in self._buckets]
        # The comparison is false for NaN too. A limit times the scale could be infinite, which bounds nothing.
        if all(math.sqrt(total) / divisor.scale <= limit for total, limit in zip(self.sums, limits, strict=True)):
            return False
        return divisor.read(divisor.judge_quotients(self._buckets))

    def remember(self) -> None:
        """Keep what will tell ``undivided``: where Σx² overflowed or underflowed, max|x|; the host reads nothing."""
        if self._sums is None:  # there were no doubts, so that none is needed
            self._largest = [None] * len(self._buckets)
            return
        self._largest = [
            None if 0.0 < total < math.inf else _power(bucket, math.inf)
            for total, bucket in zip(self.sums, self._buckets, strict=True)
        ]

    def undivided(self, divisor: Divisor) -> list[Bucket]:
        """Return the buckets that have not been divided since ``remember``, all of them if it was not called."""
        if self._largest is None:
            return self._buckets
        found: list[Bucket] = []
        for bucket, total, largest in zip(self._buckets, self.sums, self._largest, strict=True):
            if largest is None:
                before, after, squared = total, float(_power(bucket, 2.0)), 2
            else:
                before, after, squared = float(largest), float(_power(bucket, math.inf)), 1
            if _is_unchanged(before, after, squared * math.log(divisor.scale)):
                found.append(bucket)
        return found


def _power(bucket: Bucket, order: float) -> Tensor:
    (power,) = _norms.power([bucket], order)
    return power


def _is_unchanged(before: float, after: float, divisor: float) -> bool:
    """Whether a magnitude is what it was, within rounding, and not what a divisor (its logarithm) makes of it.

    False for 0, which no division changes, and for what overflowed or what somebody else has changed since.
    """
    if before == 0.0 or not 0.0 < after < math.inf:
        return False
    moved = math.log(after) - math.log(before)
    return abs(moved) < min(abs(moved + divisor), _ROUNDING)
