"""Division by the scale, and the verdict whether every quotient is finite.

Knows strided tensors, their dtypes and their devices. Refuses to know optimizers: which tensors are
gradients, and whether they may be divided, was settled before.

A verdict holds one flag a device, which the host has not read yet.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from lucid.amp import _torch
from lucid.amp._torch import Bucket

DIVIDES_IN: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""The dtype of a gradient → the dtype in which it is divided; the quotient is then rounded back once."""

Verdict: TypeAlias = list[Tensor]
"""A flag on each device: float32, zero-dimensional, above zero where a quotient there is not finite."""

PIECE = 2**23
"""Elements of the workspace, which is float32: 32 MiB."""


class Factors(dict[tuple[torch.device, torch.dtype], Tensor]):
    """Zero-dimensional tensors that hold one number on every device and in every dtype asked for, refreshed in place.

    Each stays the same tensor, so that a captured graph follows it.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, key: tuple[torch.device, torch.dtype]) -> Tensor:
        device, dtype = key
        if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the scale was used for the first time on {device} inside a CUDA graph capture. Call scale() once "
                "on that device before the capture, so that the graph follows the scale."
            )
        # One that was made in inference mode could be neither refreshed nor used for training later.
        with torch.inference_mode(False):
            factor = torch.full((), self._value, dtype=dtype, device=device)
        if type(factor) is Tensor:  # a fake one serves the fake tensors that it was made beside, and nothing later
            self[key] = factor
        return factor

    def set(self, value: float) -> None:
        """Put another number into every tensor that exists."""
        self._value = value
        for factor in self.values():
            factor.fill_(value)


class Flags:
    """The flags that verdicts are made of.

    One that was read and found to be zero is lent again, which spares a launch for each optimizer and step.
    """

    def __init__(self) -> None:
        self._zeros: dict[torch.device, Tensor] = {}

    def of(self, verdict: Verdict, device: torch.device) -> Tensor:
        """Return the verdict's flag on a device; it is zero until a quotient there is not finite."""
        for flag in verdict:
            if flag.device == device:
                return flag
        zero = self._zeros.pop(device, None)
        if zero is None:
            with torch.inference_mode(False):  # as above: it may be lent outside
                zero = torch.zeros((), dtype=torch.float32, device=device)
        verdict.append(zero)
        return zero

    def take_back(self, verdict: Verdict) -> None:
        """Lend the flags of a verdict again: they are known to be zero."""
        for flag in verdict:
            self._zeros[flag.device] = flag

    def read(self, verdict: Verdict) -> bool:
        """Whether a quotient of a verdict overflowed: one host read, none for an empty verdict; it is used up."""
        if any(numbers(verdict)):
            return True
        self.take_back(verdict)
        return False

    def read_beside(self, verdict: Verdict, tensors: list[Tensor]) -> tuple[bool, list[float]]:
        """Read a verdict, and in the same host read the values of zero-dimensional tensors."""
        read = numbers([*verdict, *tensors])
        overflow = any(read[: len(verdict)])
        if not overflow:
            self.take_back(verdict)
        return overflow, read[len(verdict) :]


class Divisor:
    """A scale as what gradients are divided by.

    Attributes:
        scale: the number.
        tensors: the same, as a tensor on each device and in each dtype.
        traced: the float32 ones that compiled graphs hold, by device.
        read, read_beside, take_back: those of the ``Flags`` that its verdicts are made of.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.tensors = Factors(scale)
        # A plain dict: a graph that looks into one of another class is made again at each new key.
        self.traced: dict[torch.device, Tensor] = {}
        self._reciprocals = Factors(1.0 / scale)
        self._ones = Factors(1.0)
        self._flags = Flags()
        self.read, self.read_beside, self.take_back = self._flags.read, self._flags.read_beside, self._flags.take_back
        self._multiplies = _multiplies_exactly(scale)

    def set(self, scale: float) -> None:
        """Divide by another scale from now on."""
        self.tensors.set(scale)
        self._reciprocals.set(1.0 / scale)
        self._multiplies = _multiplies_exactly(scale)
        self.scale = scale  # last, so that the next call makes good what an interrupt left half done

    @_torch.constant_when_traced
    def prepare(self, device: torch.device) -> None:
        """Put the scale's tensor there into ``traced``; under a compiler at once, outside the graph."""
        self.traced[device] = self.tensors[device, torch.float32]

    def passes(self, buckets: list[Bucket]) -> int:
        """How often ``divide_`` goes over the memory of these tensors: once where one operator divides and judges."""
        at_once = self._multiplies and all(_torch.check_and_multiply(device, dtype) for device, dtype, _ in buckets)
        return 1 if at_once else 2

    def divide_(self, buckets: list[Bucket], judged: bool = True) -> Verdict:
        """Divide in place and return the verdict on the quotients; nothing is read by the host.

        Args:
            buckets: of any devices and of the dtypes of ``DIVIDES_IN``; no memory twice.
            judged: False where the verdict is known, so that the quotients need not be looked at.
        """
        verdict: Verdict = []
        for device, dtype, bucket in buckets:
            overflow = self._flags.of(verdict, device)
            if self._multiplies and (check_and_multiply_ := _torch.check_and_multiply(device, dtype)):
                check_and_multiply_(bucket, overflow, self._reciprocals[device, torch.float32])
            else:
                self._divide_bucket(bucket, dtype, overflow if judged else None)
        return verdict

    @_torch.without_grad
    def _divide_bucket(self, bucket: list[Tensor], dtype: torch.dtype, overflow: Tensor | None) -> None:
        """Divide in place, where no operator does it at once, and look at the quotients unless ``overflow`` is None."""
        wide = DIVIDES_IN[dtype]
        if wide is not dtype and not self._multiplies:
            self._divide_rounding(bucket, wide, overflow)
            return
        # Any dtype holds a power of two, and loses nothing that float32 would not lose, too.
        _torch.divide_(bucket, self.tensors[bucket[0].device, dtype])
        if overflow is not None:
            self._check(bucket, overflow)

    @_torch.without_grad
    def judge(self, buckets: list[Bucket], verdict: Verdict | None = None) -> Verdict:
        """Return the verdict on tensors that hold their true values already, added to another one if given."""
        verdict = [] if verdict is None else verdict
        for device, _, bucket in buckets:
            self._check(bucket, self._flags.of(verdict, device))
        return verdict

    @_torch.without_grad
    def judge_quotients(self, buckets: list[Bucket]) -> Verdict:
        """Return the verdict on the quotients of tensors that stay as they are, piece by piece."""
        verdict: Verdict = []
        for device, dtype, bucket in buckets:
            divisor = self.tensors[device, DIVIDES_IN[dtype]]
            for group in pieces(bucket):
                self._check(_quotients(group, divisor), self._flags.of(verdict, device))
        return verdict

    def _divide_rounding(self, bucket: list[Tensor], dtype: torch.dtype, overflow: Tensor | None) -> None:
        divisor = self.tensors[bucket[0].device, dtype]
        for group in pieces(bucket):
            self._divide_group_rounding(group, divisor, overflow)

    def _divide_group_rounding(self, group: list[Tensor], divisor: Tensor, overflow: Tensor | None) -> None:
        # A function of its own, so that one group's workspace is free before the next one's is taken.
        quotients = _quotients(group, divisor)
        if overflow is not None:
            self._check(quotients, overflow)
        _torch.copy_(group, quotients)

    def _check(self, bucket: list[Tensor], overflow: Tensor) -> None:
        """Raise ``overflow`` above zero if an element of the bucket is not finite."""
        device, dtype = bucket[0].device, bucket[0].dtype
        check_and_multiply_ = _torch.check_and_multiply(device, dtype)
        if check_and_multiply_:
            check_and_multiply_(bucket, overflow, self._ones[device, torch.float32])
        else:
            largest = torch.stack(list(_torch.norms(bucket, math.inf)))
            # isfinite would be four operators: inf · 0 and NaN · 0 are NaN, which is not 0.
            overflow.add_(largest.mul_(0.0).ne(0.0).any())


def _quotients(group: list[Tensor], divisor: Tensor) -> list[Tensor]:
    """Return the quotients in the divisor's dtype, as new tensors."""
    quotients = _torch.copies(group, divisor.dtype)
    _torch.divide_(quotients, divisor)
    return quotients


def _multiplies_exactly(scale: float) -> bool:
    """Whether a product with the reciprocal is the quotient, and finite exactly where the gradient is."""
    return 1.0 <= scale <= 2.0**126 and math.frexp(scale)[0] == 0.5


def numbers(tensors: list[Tensor]) -> list[float]:
    """Return the values of zero-dimensional tensors of any devices and dtypes; the host waits once at most."""
    if len(tensors) == 1:
        return [tensors[0].item()]
    # To send a number from the CPU to a device would be a wait of its own.
    read = {on_cpu: iter(_read([t for t in tensors if t.is_cpu is on_cpu])) for on_cpu in (True, False)}
    return [next(read[tensor.is_cpu]) for tensor in tensors]


def _read(tensors: list[Tensor]) -> list[float]:
    """Return the values of tensors that are all on the CPU or all on other devices."""
    if not tensors:
        return []
    dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
    values: list[float] = torch.stack([tensor.to(tensors[0].device, dtype) for tensor in tensors]).tolist()
    return values


def pieces(bucket: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield views that make up the bucket, in lists of at most ``PIECE`` elements together."""
    if sum(map(Tensor.numel, bucket)) <= PIECE:
        yield from (bucket,) if bucket else ()
        return
    group: list[Tensor] = []
    room = PIECE
    for piece in itertools.chain.from_iterable(map(_slices, bucket)):
        if group and piece.numel() > room:
            yield group
            group, room = [], PIECE
        group.append(piece)
        room -= piece.numel()
    if group:
        yield group


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of at most ``PIECE`` elements that make up the tensor."""
    if tensor.numel() <= PIECE:
        yield tensor
    elif tensor.is_contiguous():
        yield from (tensor.view(-1)[begin : begin + PIECE] for begin in range(0, tensor.numel(), PIECE))
    else:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        for half in tensor.tensor_split(2, dim=longest):
            yield from _slices(half)
