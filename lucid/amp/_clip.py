"""Unscaling and clipping in one multiplication for each gradient.

Knows the gradients of one optimizer, the divisor and the norm that is wanted. Refuses to know stages.

The norm of the scaled gradients is read once; the true norm is that over the scale, since ‖x / s‖ = ‖x‖ / s.
Every gradient is then multiplied by min(1, max_norm / (norm + 1e-6)) / s, the formula of
``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lucid.amp import _division, _norms, _torch
from lucid.amp._consensus import Consensus, Poll
from lucid.amp._division import DIVIDES_IN, Divisor, Verdict
from lucid.amp._gradients import Gradients
from lucid.amp._memory import region
from lucid.amp._shares import Part, Shares
from lucid.amp._torch import Bucket, by_device_and_dtype

_LIMIT = torch.finfo(torch.float32).max * 0.999
"""Float32 norms are rounded: a norm this close to the largest number is looked at again."""

_UNDERFLOW = 2.0**-100
"""A sum of powers below this may have lost parts below float32's smallest number."""

_TINY = torch.finfo(torch.float32).tiny


class Clipped(NamedTuple):
    """The true total norm, zero-dimensional, and whether a quotient was not finite (nothing is clipped then)."""

    norm: Tensor
    overflow: bool


class Clipping:
    """What is asked: a bound, an order, and the parameters that it is about."""

    def __init__(self, max_norm: float, order: float, parameters: Tensor | Iterable[Tensor] | None) -> None:
        self.max_norm, self.order = _bound(max_norm), _order(order)
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        self.parameters = None if parameters is None else list(parameters)

    def coefficient(self, norm: float) -> float:
        """Return what the true gradients, all of them finite, are multiplied by."""
        if norm == self.max_norm == math.inf:
            return 1.0
        return min(1.0, self.max_norm / (norm + 1e-6))

    def split(self, optimizer: Any, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors the norm is taken of, and the others; each memory once, those to divide first."""
        tensors = gradients.fresh + gradients.divided if gradients.divided else gradients.fresh
        if self.parameters is None:
            return tensors, []
        self._check(optimizer)
        asked = {id(parameter) for parameter in self.parameters}
        # On the short way no two gradients are the same memory, so that the object says as much.
        key: Callable[[Tensor], object] = id if gradients.values is gradients.fresh else region
        chosen = {key(tensor) for parameter, tensor in gradients.pairs if id(parameter) in asked and tensor.numel()}
        return [t for t in tensors if key(t) in chosen], [t for t in tensors if key(t) not in chosen]

    def _check(self, optimizer: Any) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for index, parameter in enumerate(self.parameters or ()):
            if id(parameter) not in own:
                raise ValueError(
                    f"parameters[{index}] (shape {tuple(parameter.shape)}) is not a parameter of this "
                    f"{type(optimizer).__name__}, so its gradient cannot be unscaled here. Pass parameters of the "
                    "optimizer, or leave parameters= out to clip all of them."
                )


def clip_(
    chosen: list[Tensor], others: list[Tensor], gradients: Gradients, divisor: Divisor, clipping: Clipping
) -> Clipped:
    """Divide all gradients in place by the scale, and clip the chosen ones."""
    if gradients.divided or not _norms.is_additive(clipping.order):
        verdict = divisor.judge(by_device_and_dtype(gradients.divided), divisor.divide_(gradients.buckets))
        return _clip_true(chosen, clipping, divisor, verdict)
    buckets = gradients.buckets if chosen is gradients.fresh else by_device_and_dtype(chosen)
    parts, verdict = _norms.power(buckets, clipping.order), divisor.divide_(by_device_and_dtype(others))
    overflow, powers = divisor.read_beside(verdict, parts)
    total = _total(powers, clipping.order)
    norm = _norms.root(total, clipping.order) / divisor.scale
    # No magnitude exceeds the norm, so one comparison clears every quotient. Powers that overflowed, or that are
    # so small that some underflowed, say nothing about it.
    if overflow or not (norm <= _LIMIT and _UNDERFLOW < total < math.inf):
        return _clip_true(chosen, clipping, divisor, divisor.divide_(buckets), overflow)
    _multiply_(buckets, divisor, clipping.coefficient(norm))
    return Clipped(_tensor(norm, buckets), overflow=False)


class Agreed(NamedTuple):
    """What all ranks have agreed on, none having changed a gradient yet: the norm, of what, and what lies beside."""

    poll: Poll
    parts: list[Part]
    beside: list[Part]


def refuse_to_count(clipping: Clipping) -> None:
    """Refuse the one order for which ranks cannot tell a norm together."""
    if clipping.order == 0:
        raise ValueError("norm_type 0 counts tensors, and ranks hold parts of tensors. Use a norm_type other than 0.")


def agree(
    optimizer: Any,
    gradients: Gradients,
    chosen: list[Tensor],
    others: list[Tensor],
    divisor: Divisor,
    clipping: Clipping,
    groups: Sequence[Any],
    consensus: Consensus,
) -> Agreed:
    """Read the gradients, and agree on norm and verdict with all ranks of the groups; nothing is changed."""
    fresh = {id(tensor) for tensor in gradients.fresh}
    parameters = {id(tensor): parameter for parameter, tensor in gradients.pairs}
    parts = [Part(parameters[id(tensor)], tensor, id(tensor) in fresh) for tensor in chosen]
    beside = [Part(parameters[id(tensor)], tensor, id(tensor) in fresh) for tensor in others]
    shares = Shares(parts, groups, consensus.given(optimizer))
    (norm, _), finite = _look([shares.counted, shares.rest + beside], divisor, clipping.order)
    mine = Poll(norm, clipping.order, shares.questions, overflow=not finite)
    poll = consensus.measure(optimizer, groups, mine, scale=divisor.scale)
    if poll.questions and not poll.overflow:
        (norm,), _ = _look([shares.resolve(poll.questions, consensus)], divisor, clipping.order)
        rest = consensus.measure(optimizer, groups, Poll(norm, clipping.order), scale=divisor.scale)
        poll = poll._replace(norm=_norms.combined([poll.norm, rest.norm], clipping.order))
    return Agreed(poll, parts, beside)


def clip_together_(agreed: Agreed, gradients: Gradients, divisor: Divisor, clipping: Clipping) -> Clipped:
    """Do what :func:`clip_` does, by the norm and the verdict of all ranks."""
    poll, parts, beside = agreed
    buckets = by_device_and_dtype([part.values for part in parts])
    if poll.overflow:
        divisor.divide_(gradients.buckets, judged=False)
        return Clipped(_tensor(poll.norm if not math.isfinite(poll.norm) else math.inf, buckets), overflow=True)
    coefficient = clipping.coefficient(poll.norm)
    _multiply_(_buckets(parts, scaled=True), divisor, coefficient)
    _scale_down_(_buckets(parts, scaled=False), coefficient)
    divisor.divide_(_buckets(beside, scaled=True), judged=False)
    return Clipped(_tensor(poll.norm, buckets), overflow=False)


def _look(lists: Sequence[Sequence[Part]], divisor: Divisor, order: float) -> tuple[list[float], bool]:
    """Return the norm of the true values of each list, and whether all of them are finite; changes nothing."""
    halves = [_buckets(parts, scaled) for parts in lists for scaled in (True, False)]
    powers = [_norms.power(half, order) if _norms.is_additive(order) else [] for half in halves]
    numbers = iter(_division.numbers([power for parts in powers for power in parts]))
    totals = [[next(numbers) for _ in parts] for parts in powers]
    norms, all_finite = [], True
    for index, (half, total) in enumerate(zip(halves, totals, strict=True)):
        norm, finite = _norm_of(half, total, divisor if index % 2 == 0 else Divisor(1.0), order)
        norms.append(norm)
        all_finite = all_finite and finite
    return [_norms.combined(pair, order) for pair in zip(norms[::2], norms[1::2], strict=True)], all_finite


def _buckets(parts: Sequence[Part], scaled: bool) -> list[Bucket]:
    return by_device_and_dtype([part.values for part in parts if part.scaled is scaled])


def _norm_of(buckets: list[Bucket], totals: list[float], divisor: Divisor, order: float) -> tuple[float, bool]:
    """Return the norm of tensors over the scale, and whether every quotient is finite."""
    if not buckets:
        return (0.0 if order > 0 else math.inf), True
    total = _total(totals, order)
    if _UNDERFLOW < total < math.inf and (norm := _norms.root(total, order) / divisor.scale) <= _LIMIT:
        return norm, True
    if divisor.read(divisor.judge_quotients(buckets)):
        return (math.nan if math.isnan(total) else math.inf), False
    if _norms.is_additive(order):
        return _norms.robust(buckets, order) / divisor.scale, True
    tensors = [tensor for _, _, bucket in buckets for tensor in bucket]
    return float(torch.nn.utils.get_total_norm(tensors, order)) / divisor.scale, True


def _total(powers: list[float], order: float) -> float:
    """Return the power of all; NaN where one of them is."""
    return sum(powers) if order < math.inf or any(map(math.isnan, powers)) else max(powers, default=0.0)


def _clip_true(
    chosen: list[Tensor], clipping: Clipping, divisor: Divisor, verdict: Verdict, overflow: bool = False
) -> Clipped:
    """Clip gradients that hold their true values already; after an overflow, known or judged, only tell their norm."""
    if not chosen:
        return Clipped(torch.tensor(0.0), divisor.read(verdict) or overflow)
    buckets = by_device_and_dtype(chosen)
    norm = torch.nn.utils.get_total_norm(chosen, clipping.order)
    judged, (value,) = divisor.read_beside(verdict, [norm])
    if overflow or judged:
        return Clipped(norm if not math.isfinite(value) else torch.full_like(norm, math.inf), overflow=True)
    if not math.isfinite(value):
        value = _norms.robust(buckets, clipping.order)
        norm = _tensor(value, buckets)
    _scale_down_(buckets, clipping.coefficient(value))
    return Clipped(norm, overflow=False)


def _multiply_(buckets: list[Bucket], divisor: Divisor, coefficient: float) -> None:
    """Multiply by coefficient / scale, in one pass wherever float32 holds that factor."""
    factor = coefficient / divisor.scale
    if coefficient == 1.0 or factor < _TINY:
        divisor.divide_(buckets, judged=False)
        _scale_down_(buckets, coefficient)
    else:
        _scale_down_(buckets, factor)


def _scale_down_(buckets: list[Bucket], factor: float) -> None:
    if factor == 1.0:
        return
    for device, dtype, bucket in buckets:
        number = torch.full((), factor, dtype=DIVIDES_IN[dtype], device=device)
        if dtype is not torch.float64 and _torch.has_check_and_multiply(device, dtype):
            # As a multiplication alone: it is the fastest batched one, and its verdict is known.
            _torch.check_and_multiply_(bucket, torch.zeros((), dtype=torch.float32, device=device), number)
        elif number.dtype is dtype:
            _torch.multiply_(bucket, number)
        else:
            for group in _division.pieces(bucket):
                products = _torch.copies(group, number.dtype)
                _torch.multiply_(products, number)
                _torch.copy_(group, products)


def _tensor(norm: float, buckets: list[Bucket]) -> Tensor:
    """Return the norm as PyTorch does: on the first tensor's device, in the widest dtype."""
    if not buckets:
        return torch.tensor(norm)
    dtype = functools.reduce(torch.promote_types, [dtype for _, dtype, _ in buckets])
    # The norm of finite gradients may be beyond their dtype.
    norm = norm if norm <= torch.finfo(dtype).max else math.inf
    return torch.full((), norm, dtype=dtype, device=buckets[0][0])


def _bound(max_norm: Any) -> float:
    value = float(max_norm)
    if not value >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm!r}")
    return value


def _order(norm_type: Any) -> float:
    value = float(norm_type)
    if math.isnan(value):
        raise ValueError(f"norm_type must be a number or inf, got {norm_type!r}")
    return value
