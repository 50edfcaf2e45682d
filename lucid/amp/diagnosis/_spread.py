"""How the magnitudes of a tensor are spread over the powers of two, and what float16 makes of them.

Knows float16: largest 65504, smallest normal 2⁻¹⁴, smallest 2⁻²⁴, round to nearest even. Measures on the
tensor's own device and reads nothing until it is asked. Refuses to know what the tensor is a gradient of.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

__all__ = ["LARGEST", "LOWEST_BIT", "SMALLEST_NORMAL_BIT", "TOP_BIT", "Fate", "Measure", "Spread"]

LARGEST = 65504.0
TOP_BIT, SMALLEST_NORMAL_BIT, LOWEST_BIT = 16, -14, -24

# A float32 without its sign is 8 bits of exponent and 23 of mantissa. Exponent field e means 2ᵉ⁻¹²⁷; field 0
# holds zero (and float32's own subnormals), the last one inf and NaN.
_MANTISSA_BITS, _BIAS, _FIELDS = 23, 127, 256
_MANTISSA, _INF = (1 << 23) - 1, 255 << 23
# Three kinds a bin, so that float16's rounding is exact at any power-of-two scale: exactly the power of two
# (2⁻²⁵ ties to zero), between, and from 65520/32768 times it upwards (65520 rounds to inf).
_TOP_MANTISSA = (65520 - 32768) << 8
# Above this size the median comes from bins of 2⁻¹¹ of a power of two instead of from sorting.
_SORTED_AT_MOST, _FINE_BITS = 1 << 15, 12
# So many counts at most, in rows of few bins, are added to side by side.
_SIDE_BY_SIDE = 1 << 15


class Fate(NamedTuple):
    """What becomes of a tensor's elements in float16, in percent of all its elements.

    Attributes:
        zero: were exactly zero already.
        flush: are not zero and become zero.
        subnormal: keep fewer than 11 significant bits, being below 2⁻¹⁴.
        overflow: become inf.
    """

    zero: float
    flush: float
    subnormal: float
    overflow: float


class Measure:
    """A tensor measured on its device, not read yet.

    Args:
        tensor: floating point, of any shape; a copy is not kept.
        factor: the tensor is measured as if multiplied by this; finite and > 0.
    """

    def __init__(self, tensor: torch.Tensor, factor: float = 1.0) -> None:
        self.elements = tensor.numel()
        self._factor = factor
        with torch.no_grad():
            bits = _bits(tensor.detach().reshape(-1), _split(factor)[0])
            self._counts = _counts(bits)
            self._extremes = torch.stack([_largest(bits), _median(bits)])

    def read(self) -> Spread:
        """The spread; it waits for the device."""
        counts = self._counts.tolist()
        largest, median = (_magnitude(bits, self._factor) for bits in self._extremes.tolist())
        shift = _split(self._factor)[1] - _BIAS
        fields = {field: tuple(counts[3 * field : 3 * field + 3]) for field in range(_FIELDS - 1)}
        zero, *tiny = fields.pop(0)
        fields[0] = (0, *tiny)
        bins = {field + shift: kinds for field, kinds in sorted(fields.items()) if any(kinds)}
        inf, *nan = counts[-3:]
        return Spread(self.elements, zero, inf, sum(nan), largest, median, bins)


@dataclass(frozen=True)
class Spread:
    """How the magnitudes of a tensor are spread.

    Attributes:
        elements: how many there are.
        zero: how many are exactly zero.
        inf: how many are infinite.
        nan: how many are NaN.
        largest: the largest finite magnitude; 0 where there is none.
        median: the (lower) median of the finite magnitudes that are not zero; 0 where there is none.
        bins: by exponent e, how many finite magnitudes lie in [2ᵉ, 2ᵉ⁺¹): exactly 2ᵉ, between, and from
            65520/32768 · 2ᵉ upwards (which rounds to inf where e is 15).
    """

    elements: int
    zero: int
    inf: int
    nan: int
    largest: float
    median: float
    bins: dict[int, tuple[int, ...]]

    def fate(self, shift: int = 0) -> Fate:
        """What becomes of the elements in float16, multiplied by 2**shift first."""
        flush = subnormal = overflow = 0
        for exponent, (power, between, top) in self.bins.items():
            bit, total = exponent + shift, power + between + top
            if bit >= TOP_BIT:
                overflow += total
            elif bit == TOP_BIT - 1:
                overflow += top
            elif bit < LOWEST_BIT - 1:
                flush += total
            elif bit == LOWEST_BIT - 1:
                flush += power
                subnormal += between + top
            elif bit < SMALLEST_NORMAL_BIT:
                subnormal += total
        return Fate(*(self.percent(count) for count in (self.zero, flush, subnormal, overflow)))

    def shifted(self, bits: int) -> Spread:
        """The spread of the tensor times 2**bits."""
        bins = {exponent + bits: kinds for exponent, kinds in self.bins.items()}
        largest, median = math.ldexp(self.largest, bits), math.ldexp(self.median, bits)
        return replace(self, largest=largest, median=median, bins=bins)

    def percent(self, count: int) -> float:
        """``count`` in percent of all elements; 0 of an empty tensor."""
        return 100.0 * count / self.elements if self.elements else 0.0

    def shares(self) -> dict[int, float]:
        """By exponent e, the percent of all elements whose magnitude lies in [2ᵉ, 2ᵉ⁺¹)."""
        return {exponent: self.percent(sum(kinds)) for exponent, kinds in sorted(self.bins.items())}

    @property
    def unused_bits(self) -> float | None:
        """How many powers of two lie between the largest magnitude and 65504; None where all is zero."""
        return math.log2(LARGEST) - math.log2(self.largest) if self.largest > 0 else None


def _bits(flat: torch.Tensor, mantissa: float) -> torch.Tensor:
    """The magnitudes times ``mantissa``, as float32's bits in int32."""
    if flat.device.type not in ("cpu", "cuda"):
        flat = flat.cpu()
    if flat.dtype is torch.float64:
        flat = _into_float32(flat)
    # Always a copy: the bits are changed in place below.
    values = flat.to(torch.float32, copy=True)
    if mantissa != 1:
        values *= mantissa
    return values.view(torch.int32).bitwise_and_(0x7FFFFFFF)


def _split(factor: float) -> tuple[float, int]:
    """The factor as m · 2ᵉ with m in (1/2, 1], so that nothing overflows and a power of two rounds nothing."""
    mantissa, exponent = math.frexp(factor)
    return (1.0, exponent - 1) if mantissa == 0.5 else (mantissa, exponent)


def _into_float32(flat: torch.Tensor) -> torch.Tensor:
    """What is finite and not zero in float64 stays so in float32: at its ends."""
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    magnitudes = flat.abs()
    inside = torch.where(magnitudes == 0, magnitudes, magnitudes.clamp(smallest, largest))
    return torch.where(torch.isinf(magnitudes), magnitudes, inside)


def _counts(bits: torch.Tensor) -> torch.Tensor:
    """How many of each exponent field and kind: three numbers a field."""
    mantissas = bits & _MANTISSA
    places = (bits >> _MANTISSA_BITS).mul_(3).add_(1)
    places.add_(mantissas >= _TOP_MANTISSA).sub_((mantissas == 0).int())
    return _histogram(places, 3 * _FIELDS)


def _histogram(places: torch.Tensor, bins: int) -> torch.Tensor:
    """How often each number below ``bins`` comes; nothing is read."""
    if places.is_cpu:
        return torch.bincount(places, minlength=bins)
    # Elsewhere bincount waits for the largest number.
    dtype = torch.int32 if places.numel() < 2**31 else torch.int64
    # Where bins are few, several rows of them are added to, so that few additions wait for one another.
    rows = max(1, _SIDE_BY_SIDE // bins)
    if rows > 1:
        row = torch.arange(places.numel(), dtype=dtype, device=places.device).remainder_(rows)
        places = row.mul_(bins).add_(places)
    counts = torch.zeros(rows * bins, dtype=dtype, device=places.device)
    counts.index_add_(0, places, torch.ones((), dtype=dtype, device=places.device).expand(places.numel()))
    return counts.view(rows, bins).sum(0)


def _largest(bits: torch.Tensor) -> torch.Tensor:
    """The bits of the largest finite magnitude; 0 where there is none."""
    return torch.where(bits < _INF, bits, 0).max() if bits.numel() else bits.new_zeros(())


def _median(bits: torch.Tensor) -> torch.Tensor:
    """The bits of the lower median of what is finite and not zero; 0 where there is nothing."""
    if not bits.numel():
        return bits.new_zeros(())
    if bits.numel() <= _SORTED_AT_MOST:
        ordered = torch.where(bits < _INF, bits, 0).sort().values
        zeros = (ordered == 0).sum()
        middle = (zeros + (ordered.numel() - zeros - 1).clamp_min(0) // 2).clamp_max(ordered.numel() - 1)
        return ordered.gather(0, middle.reshape(1)).reshape(())
    fine = _histogram(bits >> _FINE_BITS, _FIELDS << (_MANTISSA_BITS - _FINE_BITS))
    fine = fine[: _INF >> _FINE_BITS]
    fine[0] -= (bits == 0).sum()
    running = fine.cumsum(0)
    middle = torch.searchsorted(running, (running[-1:] + 1) // 2).reshape(())
    half_a_bin = 1 << (_FINE_BITS - 1)
    return torch.where(running[-1] > 0, (middle << _FINE_BITS) + half_a_bin, 0).to(torch.int32)


def _magnitude(bits: int, factor: float) -> float:
    """The float32 that has these bits, moved by the power of two that ``_bits`` left out of the factor."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return math.ldexp(value, _split(factor)[1])
