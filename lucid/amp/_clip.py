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

from lucid.amp import _division, _gradients, _norms, _torch
from lucid.amp._division import DIVIDES_IN, Divisor, Verdict
from lucid.amp._gradients import Gradients
from lucid.amp._memory import region
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


class Split(NamedTuple):
    """Gradients in two lists, each memory once: what is clipped and the others; and what the norm is taken of.

    ``counted`` is ``chosen`` but where a gradient repeats its values, or is that of two parameters: each counts, where
    one process clips alone. ``asked`` are these gradients as they were asked for, those without elements too: the norm
    is on the first one's device, in the widest of their dtypes.
    """

    chosen: list[Tensor]
    others: list[Tensor]
    counted: list[Tensor]
    asked: list[Tensor]


class Clipping:
    """What is asked: a bound, an order, and the parameters that it is about."""

    def __init__(self, max_norm: float, order: float, parameters: Tensor | Iterable[Tensor] | None) -> None:
        self.max_norm, self.order = _bound(max_norm), _order(order)
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        self.parameters = None if parameters is None else list(parameters)
        for index, parameter in enumerate(self.parameters or ()):
            if not isinstance(parameter, Tensor):
                raise TypeError(f"parameters[{index}] must be a parameter of the optimizer, got {parameter!r}")

    def coefficient(self, norm: float) -> float:
        """Return what the true gradients, all of them finite, are multiplied by."""
        if norm == self.max_norm == math.inf:
            return 1.0
        return min(1.0, self.max_norm / (norm + 1e-6))

    def split(self, optimizer: Any, gradients: Gradients) -> Split:
        """Return what is clipped and what lies beside it.

        Raises:
            ValueError: a parameter is not the optimizer's.
        """
        tensors = gradients.fresh + gradients.divided if gradients.divided else gradients.fresh
        short_way = gradients.values is gradients.fresh
        if self.parameters is None and short_way:
            return Split(tensors, [], tensors, tensors)
        self._check(optimizer)
        about = list(gradients.pairs)
        if self.parameters is not None:
            asked = {id(parameter): place for place, parameter in enumerate(self.parameters)}
            about = sorted((pair for pair in about if id(pair[0]) in asked), key=lambda pair: asked[id(pair[0])])
        pairs = [pair for pair in about if pair[1].numel()]
        # On the short way no two gradients are the same memory, so that the object says as much.
        key: Callable[[Tensor], object] = id if short_way else region
        clipped = {key(values) for _, values in pairs}
        chosen = [tensor for tensor in tensors if key(tensor) in clipped]
        counted = [_whole(parameter, values) for parameter, values in pairs]
        if sum(map(Tensor.numel, counted)) == sum(map(Tensor.numel, chosen)):
            counted = chosen
        others = [tensor for tensor in tensors if key(tensor) not in clipped]
        return Split(chosen, others, counted, [values for _, values in about])

    def _check(self, optimizer: Any) -> None:
        own = set(map(id, _gradients.parameters(optimizer)))
        for index, parameter in enumerate(self.parameters or ()):
            if id(parameter) not in own:
                raise ValueError(
                    f"parameters[{index}] (shape {tuple(parameter.shape)}) is not a parameter of this "
                    f"{type(optimizer).__name__}, so its gradient cannot be unscaled here. Pass parameters of the "
                    "optimizer, or leave parameters= out to clip all of them."
                )


class Alone:
    """A clip by this process alone. Making it reads; only :meth:`clip_` changes anything."""

    def __init__(self, split: Split, gradients: Gradients, divisor: Divisor, clipping: Clipping) -> None:
        self._split, self._gradients, self._divisor, self._clipping = split, gradients, divisor, clipping
        self._parts: list[Tensor] | None = None
        whole = split.chosen is gradients.fresh
        self._buckets = gradients.buckets if whole else by_device_and_dtype(split.chosen)
        if not gradients.divided and split.counted is split.chosen and _norms.is_additive(clipping.order):
            self._parts = _norms.power(self._buckets, clipping.order)

    def clip_(self) -> Clipped:
        """Divide all gradients in place by the scale, and clip the chosen ones."""
        divisor, order, gradients = self._divisor, self._clipping.order, self._gradients
        if self._parts is None:
            verdict = divisor.judge(by_device_and_dtype(gradients.divided), divisor.divide_(gradients.buckets))
            return self._clip_true(verdict)
        verdict = divisor.divide_(by_device_and_dtype(self._split.others))
        overflow, powers = divisor.read_beside(verdict, self._parts)
        power = total(powers, order)
        norm = _norms.root(power, order) / divisor.scale
        # No magnitude exceeds the norm, so one comparison clears every quotient. Powers that overflowed, or that are
        # so small that some underflowed, say nothing about it.
        if overflow or not is_telling(power, norm):
            return self._clip_true(divisor.divide_(self._buckets), overflow)
        multiply_(self._buckets, divisor, self._clipping.coefficient(norm))
        return Clipped(self._told(norm), overflow=False)

    def _clip_true(self, verdict: Verdict, overflow: bool = False) -> Clipped:
        """Clip gradients that hold their true values; after an overflow, known or judged, only tell their norm."""
        counted, order = by_device_and_dtype(self._split.counted), self._clipping.order
        judged, norms = self._divisor.read_beside(verdict, _norms.norms(counted, order))
        norm = _norms.combined(norms, order) if norms else 0.0
        if overflow or judged:
            return Clipped(self._told(math.inf if math.isfinite(norm) else norm), overflow=True)
        if not math.isfinite(norm):
            norm = _norms.robust(counted, order)
        scale_down_(self._buckets, self._clipping.coefficient(norm))
        return Clipped(self._told(norm), overflow=False)

    def _told(self, norm: float) -> Tensor:
        asked = self._split.asked
        return as_tensor(norm, self._buckets if asked is self._split.chosen else by_device_and_dtype(asked))


def _whole(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a gradient with its repetitions, where it is a plain tensor, which may be expanded."""
    gradient = parameter.grad
    plain = type(gradient) is Tensor and gradient.layout is torch.strided and not gradient.is_nested
    return gradient if plain and gradient is not None else values


def is_telling(power: float, norm: float) -> bool:
    """Whether a power and the norm of it, over the scale, say that every quotient is finite."""
    return norm <= _LIMIT and _UNDERFLOW < power < math.inf


def is_doubtful(power: Tensor, order: float, scale: float) -> Tensor:
    """Return the opposite for a power that nobody has read, of scaled gradients: a flag, unread."""
    return _norms.exceeds(power, order, _LIMIT * scale) | (power <= _UNDERFLOW) | (power == math.inf)


def total(powers: list[float], order: float) -> float:
    """Return the power of all; NaN where one of them is."""
    return sum(powers) if order < math.inf or any(map(math.isnan, powers)) else max(powers, default=0.0)


def multiply_(buckets: list[Bucket], divisor: Divisor, coefficient: float) -> None:
    """Multiply by coefficient / scale, in one pass wherever float32 holds that factor."""
    factor = coefficient / divisor.scale
    if coefficient == 1.0 or factor < _TINY:
        # Every quotient is finite, so that no flag was raised.
        divisor.take_back(divisor.divide_(buckets, judged=False))
        scale_down_(buckets, coefficient)
    else:
        scale_down_(buckets, factor)


def scale_down_(buckets: list[Bucket], factor: float) -> None:
    """Multiply by a factor of at most 1."""
    if factor == 1.0:
        return
    for device, dtype, bucket in buckets:
        number = torch.full((), factor, dtype=DIVIDES_IN[dtype], device=device)
        check_and_multiply_ = _torch.check_and_multiply(device, dtype) if dtype is not torch.float64 else None
        if check_and_multiply_:
            # As a multiplication alone: it is the fastest batched one, and its verdict is known.
            check_and_multiply_(bucket, torch.zeros((), dtype=torch.float32, device=device), number)
        elif number.dtype is dtype:
            _torch.multiply_(bucket, number)
        else:
            for group in _division.pieces(bucket):
                products = _torch.copies(group, number.dtype)
                _torch.multiply_(products, number)
                _torch.copy_(group, products)


def as_tensor(norm: float, buckets: list[Bucket], elsewhere: Sequence[torch.dtype] = ()) -> Tensor:
    """Return the norm as PyTorch does: on the first tensor's device, in the widest dtype, here or on other ranks."""
    device = buckets[0][0] if buckets else torch.device("cpu")
    dtypes = [*(dtype for _, dtype, _ in buckets), *elsewhere]
    dtype = functools.reduce(torch.promote_types, dtypes or [torch.float32])
    if device.type == "mps" and dtype is torch.float64:
        dtype = torch.float32  # the gradients of that dtype lie elsewhere
    # The norm of finite gradients may be beyond their dtype.
    norm = math.inf if norm > torch.finfo(dtype).max else norm
    return torch.full((), norm, dtype=dtype, device=device)


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
