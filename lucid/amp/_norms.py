"""The norm of many tensors in one read of each.

Knows strided tensors of any device and dtype. Refuses to know gradients and scales. A total is kept as its
power, Σ|x|ᵖ, since powers of parts (and of ranks) add up; for p = ∞ it is the largest magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lucid.amp import _torch
from lucid.amp._division import DIVIDES_IN, pieces
from lucid.amp._memory import is_gapless
from lucid.amp._torch import Bucket

_SMALL = 2**14
"""Tensors of fewer elements are read together: a launch for each would cost more than the copy."""

_BLOCK = 2**20
"""Elements of one product: float32 adds this many squares with an error below 1e-5."""


_DOTS_ON = {"cpu"}
"""Where a vector's product with itself reads fastest. Elsewhere launches count: large ones share the batched norm."""


def is_additive(order: float) -> bool:
    """Whether a norm of this order is made of powers that add up (or of a largest magnitude)."""
    return order > 0


def power(buckets: Sequence[Bucket], order: float) -> list[Tensor]:
    """Return Σ|x|ᵖ of the tensors (for p = ∞ the largest |x|), one zero-dimensional tensor a bucket.

    In float64 for float64 tensors, else in float32; not finite wherever an element, or the power, is not.
    """
    results = []
    for bucket in buckets:
        _, dtype, tensors = bucket
        if order == 2.0 and DIVIDES_IN[dtype] is dtype:
            results.append(_add(list(_squares(tensors))))
        else:
            each = _each(bucket, order)
            results.append(each.amax() if order == math.inf else each.pow(order).sum())
    return results


def norms(buckets: Sequence[Bucket], order: float) -> list[Tensor]:
    """Return the norm of each bucket's tensors, one zero-dimensional tensor a bucket, for any order.

    In float64 for float64 tensors, else in float32. Of order 0 it is the number of tensors that are not all zero, as in
    PyTorch's total norm.
    """
    return [torch.linalg.vector_norm(_each(bucket, order), order) for bucket in buckets]


def root(total: float, order: float) -> float:
    """Return the norm whose power is ``total``."""
    if order == math.inf:
        return total
    return math.sqrt(total) if order == 2.0 else _raised(total, 1.0 / order)


def root_of(total: Tensor, order: float) -> Tensor:
    """Return the norm whose power is ``total``, zero-dimensional, unread."""
    if order == math.inf:
        return total
    return total.sqrt() if order == 2.0 else total.pow(1.0 / order)


def exceeds(power: Tensor, order: float, limit: float) -> Tensor:
    """Return a flag, unread: whether the norm of a power is above the limit, infinite or NaN."""
    # A limit beyond the dtype would become infinite, which is above nothing.
    return (root_of(power, order) <= min(limit, torch.finfo(power.dtype).max)).logical_not()


def _raised(base: float, exponent: float) -> float:
    """Return the power, infinite where it is beyond float64, which Python makes an error."""
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def combined(norms: Sequence[float], order: float) -> float:
    """Return the norm of what these are the norms of, the same in any order; of nothing 0 for p > 0, inf for p < 0."""
    if order == 0:
        return sum(norms)
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    pivot = (max if order > 0 else min)(norms)
    if math.isinf(order) or pivot == 0 or math.isinf(pivot):
        return pivot
    return pivot * _raised(math.fsum((norm / pivot) ** order for norm in norms), 1.0 / order)


def robust(buckets: Sequence[Bucket], order: float) -> float:
    """Return the norm of finite tensors whose power overflows: that of tensors divided by their largest element.

    ‖x‖ = m · ‖x / m‖ with m = max|x|, first for each bucket (a float64 may be beyond float32), then for their norms.
    Reads twice and needs a bounded workspace.
    """
    norms = [_robust(bucket, order) for bucket in buckets]
    largest = max(norms, default=0.0)
    if largest in (0, math.inf) or order == math.inf:
        return largest
    return largest * root(sum((norm / largest) ** order for norm in norms), order)


def _robust(bucket: Bucket, order: float) -> float:
    device, dtype, tensors = bucket
    (part,) = power([bucket], math.inf)
    largest = float(part)
    if largest == 0 or order == math.inf:
        return largest
    divisor = torch.full((), largest, dtype=DIVIDES_IN[dtype], device=device)
    return largest * root(sum(_shrunk_power(group, divisor, order) for group in pieces(tensors)), order)


def _shrunk_power(group: list[Tensor], divisor: Tensor, order: float) -> float:
    # A function of its own, so that one group's workspace is free before the next one's is taken.
    shrunk = [piece.to(divisor.dtype, copy=True).div_(divisor) for piece in group]
    (part,) = power([(divisor.device, divisor.dtype, shrunk)], order)
    return float(part)


def _squares(bucket: list[Tensor]) -> Iterator[Tensor]:
    sizes = list(map(Tensor.numel, bucket))
    small, large = bucket, []
    if max(sizes) >= _SMALL:
        sized = list(zip(bucket, sizes, strict=True))
        small = [tensor for tensor, size in sized if size < _SMALL]
        large = [tensor for tensor, size in sized if size >= _SMALL]
    yield from _squares_of_large(large)
    for group in pieces(small):
        yield from _dots(_torch.joined(group))


def _squares_of_large(tensors: list[Tensor]) -> Iterator[Tensor]:
    gapless = []
    for tensor in tensors:
        if is_gapless(tensor):
            gapless.append(tensor)
        else:
            yield torch.linalg.vector_norm(tensor).square()
    if gapless and gapless[0].device.type not in _DOTS_ON:
        yield torch.stack(list(_torch.norms(gapless, 2.0))).square().sum()
        return
    for tensor in gapless:
        yield from _dots(tensor.as_strided((tensor.numel(),), (1,)))


def _dots(vector: Tensor) -> Iterator[Tensor]:
    for begin in range(0, vector.numel(), _BLOCK):
        block = vector[begin : begin + _BLOCK]
        yield torch.dot(block, block)


def _each(bucket: Bucket, order: float) -> Tensor:
    """Return the norm of each tensor, or piece of one, as a vector; of order 0 that of each tensor."""
    device, dtype, tensors = bucket
    wide = DIVIDES_IN[dtype]
    if order == 0:  # a count in whichever dtype is 0 or is not
        return torch.stack(list(_torch.norms(tensors, order))).to(wide)
    # The CPU's kernel makes a wide copy of a narrow tensor.
    groups = pieces(tensors) if wide is not dtype and device.type == "cpu" else [tensors]
    return torch.stack([norm for group in groups for norm in _torch.norms(group, order, wide)])


def _add(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
