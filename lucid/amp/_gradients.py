"""The gradients of an optimizer: found, refused, or handed over to be divided.

Knows optimizers as ``param_groups`` and gradients of every layout. Refuses to know stages, schedules and other
ranks, and does no arithmetic: ``_division`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lucid.amp import _memory, _refusals, _torch
from lucid.amp._division import DIVIDES_IN
from lucid.amp._seen import Seen
from lucid.amp._torch import Bucket, by_device_and_dtype

_CPU = torch.device("cpu")

_LARGEST_NUMBER = 8
"""Bytes of a float64."""

_LOOKED_AT = {torch.float16, *DIVIDES_IN}
"""What a gradient that is looked at may be: one that came after ``unscale_`` was never refused."""

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged}


class Gradient(NamedTuple):
    """One gradient of an optimizer.

    Attributes:
        name: the parameter's name where the optimizer was built from ``named_parameters()``, otherwise such as
            ``group 0, parameter 3``.
        parameter: the optimizer's parameter.
        tensor: the values, strided and on one device: a DTensor's local tensor, a sparse gradient's values.
    """

    name: str
    parameter: Tensor
    tensor: Tensor


class Gradients:
    """An optimizer's gradients, sorted into those to divide and those divided before.

    Attributes:
        fresh: the tensors to divide, each memory once.
        buckets: the same, by device and dtype.
        divided: the tensors that hold their true values already and are only judged.
        coalesced: what sparse gradients were, and what they become when they are divided, by the id of the former.
        values: the values of each gradient, in the optimizer's order.
        wholes: the gradients themselves that hold an element.
        places: where the values of ``wholes`` lie.
    """

    __slots__ = ("_optimizer", "buckets", "coalesced", "divided", "fresh", "places", "values", "wholes")

    def __init__(self, optimizer: Any, seen: Seen) -> None:
        """Find, check and sort; nothing is changed.

        Args:
            optimizer: anything with ``param_groups``.
            seen: the gradients that this iteration divided already.

        Raises:
            ValueError: a gradient is float16, or overlaps itself or another one in part.
            NotImplementedError: a gradient is complex.
            TypeError: another dtype, a layout that cannot be divided, or no values (the meta device).
            RuntimeError: a gradient is an inference tensor.
        """
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
            raise _refusals.no_optimizer(optimizer)
        self._optimizer = optimizer
        self.coalesced: dict[int, tuple[Tensor, Tensor]] = {}
        self.divided: list[Tensor] = []
        self.places: _memory.Spans | list[_memory.Region]
        plain = _plain(optimizer, seen)
        if plain is None:
            self._find_odd(seen)
        else:
            found, self.places, self.buckets = plain
            self.values = self.fresh = self.wholes = found

    @_torch.without_grad
    def _find_odd(self, seen: Seen) -> None:
        """The long way, for gradients of any kind."""
        optimizer = self._optimizer
        owned = [(owner, whole) for owner in self.parameters if (whole := owner.grad) is not None]
        _refuse(optimizer, owned)
        self.values = [self._dense(optimizer, parameter, whole) for parameter, whole in owned]
        self.fresh, self.wholes, self.places = [], [], []
        self._sort(optimizer, [whole for _, whole in owned], seen, self.places)
        self.buckets = by_device_and_dtype(self.fresh)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that have a gradient, in the optimizer's order."""
        groups = self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]

    @property
    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each of these parameters, with the values of its gradient."""
        return zip(self.parameters, self.values, strict=True)

    def put_back(self) -> None:
        """Put coalesced gradients into their parameters."""
        for parameter in self.parameters:
            if id(parameter.grad) in self.coalesced:
                parameter.grad = self.coalesced[id(parameter.grad)][1]

    def _dense(self, optimizer: Any, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return the strided values of one gradient, every stored element once."""
        if whole.layout is torch.sparse_coo and not whole.is_coalesced():
            # Entries of one index are summed first: their sum may overflow where they do not.
            if id(whole) not in self.coalesced:
                self.coalesced[id(whole)] = (whole, whole.coalesce())
            whole = self.coalesced[id(whole)][1]
        values = _strided(whole)
        if values is None:
            raise _refusals.layout(optimizer, parameter)
        if values.is_neg():
            raise _refusals.negative_bit(optimizer, parameter)
        return values

    def _sort(self, optimizer: Any, found: list[Tensor], seen: Seen, regions: list[_memory.Region]) -> None:
        places: set[_memory.Region] = set()
        for whole, (parameter, tensor) in zip(found, self.pairs, strict=True):
            if tensor.numel() == 0:
                continue
            place = _memory.region(tensor)
            if place.shape and _memory.overlaps_itself(place):
                raise _refusals.overlap(optimizer, parameter, parameter)
            if place not in places:
                (self.divided if seen.has(whole, place) else self.fresh).append(tensor)
            places.add(place)
            # Every tensor of that memory is noted: the first may be gone when another optimizer meets the second.
            self.wholes.append(self.coalesced.get(id(whole), (whole, whole))[1])
            regions.append(place)
        clash = _memory.first_overlap(places.union(seen.regions()))
        if clash is not None:
            raise _refusals.overlap(optimizer, *self._owners(clash))

    def _owners(self, clash: tuple[_memory.Region, _memory.Region]) -> list[Tensor | None]:
        """Return the parameters whose gradients lie there; None for another optimizer's."""
        owners = {_memory.region(tensor): parameter for parameter, tensor in self.pairs if tensor.numel()}
        return [owners.get(place) for place in clash]


def parameters(optimizer: Any) -> list[Tensor]:
    """Return all parameters of an optimizer, in its order; TypeError for what is no optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise _refusals.no_optimizer(optimizer)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named(optimizer: Any) -> list[Gradient]:
    """Return an optimizer's gradients by name, in its order, for those who look and do not divide."""
    names = _refusals.names(optimizer)
    return [
        Gradient(names[id(parameter)], parameter, values)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
        and parameter.grad.dtype in _LOOKED_AT
        and (values := _strided(parameter.grad)) is not None
    ]


def _strided(whole: Tensor) -> Tensor | None:
    """Return the values of a gradient, every stored element once; None for a layout that has none."""
    if whole.is_nested:
        return whole.values()
    if type(whole) is Tensor and whole.layout is torch.strided:
        return whole if whole.is_contiguous() else _memory.stored(whole)
    if whole.layout is torch.sparse_coo:
        return whole.coalesce().values()
    if whole.layout in _COMPRESSED:
        return whole.values()
    if whole.layout is not torch.strided:
        return None
    return _memory.stored(whole.to_local() if hasattr(whole, "to_local") else whole)


def _plain(optimizer: Any, seen: Seen) -> tuple[list[Tensor], _memory.Spans, list[Bucket]] | None:
    """Return an optimizer's gradients, where they lie, and their buckets, if all can be divided as they are.

    A loop of cheap questions, for what nearly all gradients are: tensors without gaps that share no memory, neither
    with each other nor with what was divided before. Whatever is odd goes the long way. The number of a device tells
    which it is, since a build of PyTorch has one kind of accelerator.
    """
    found: list[Tensor] = []
    spans: _memory.Spans = [], []
    begins, ends = spans
    low = high = 0
    dtype, index, are_alike, are_apart = None, 0, True, True
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if type(gradient) is not Tensor or gradient.is_nested or gradient.is_inference():
                return None
            try:
                begin = gradient.data_ptr()
                end = begin + gradient.nbytes
            except RuntimeError:  # a layout that is no span of memory
                return None
            has_gaps = not (gradient.is_contiguous() or _memory.is_gapless(gradient))
            # 0: no element, or no memory of its own. Half of a complex number may be negative by a bit alone.
            if has_gaps or not begin or (end <= begin + _LARGEST_NUMBER and gradient.is_neg()):
                return None
            if gradient.dtype is not dtype or gradient.get_device() != index:
                dtype, index, are_alike = gradient.dtype, gradient.get_device(), not found
            # A few lie above or below all before them, which needs no sorting.
            if begin >= high:
                low, high = low or begin, end
            elif end <= low:
                low = begin
            else:
                are_apart = False
            found.append(gradient)
            begins.append(begin)
            ends.append(end)
    if not (are_apart or _memory.are_apart(spans)) or (seen.added and not seen.has_none_of(found, spans)):
        return None
    if are_alike and dtype in DIVIDES_IN and (index < 0 or _memory.is_addressed(found[0])):  # below 0: the CPU
        return found, spans, [(found[0].device if index >= 0 else _CPU, dtype, found)]
    buckets = by_device_and_dtype(found)
    return (found, spans, buckets) if all(map(_is_divisible, buckets)) else None


def _is_divisible(bucket: Bucket) -> bool:
    _, dtype, tensors = bucket
    return dtype in DIVIDES_IN and _memory.is_addressed(tensors[0])


def _refuse(optimizer: Any, owned: list[tuple[Tensor, Tensor]]) -> None:
    """Raise for the first parameter whose gradient has a dtype that cannot be divided, or cannot be changed."""
    for parameter, gradient in owned:
        if gradient.dtype not in DIVIDES_IN:
            raise _refusals.dtype(optimizer, parameter, gradient)
        if gradient.is_inference():
            raise _refusals.inference(optimizer, parameter)
        if gradient.is_meta:
            raise _refusals.without_values(optimizer, parameter)
