"""Where tensors lie in memory, which of them are the same memory, and which overlap in part.

Knows addresses, shapes and strides. Refuses to know values, gradients and optimizers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Spans: TypeAlias = tuple[list[int], list[int]]
"""Where tensors begin and where they end, each of which fills its span: addresses, in the tensors' order."""


class Region(NamedTuple):
    """The bytes of one tensor; equal regions are the same memory.

    ``shape`` and ``strides`` are empty where the tensor fills its span without gaps, whatever its shape.
    """

    begin: int
    end: int
    itemsize: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def elements(self) -> Tensor:
        """Return where each element begins, in bytes from ``begin`` on; int64, one-dimensional."""
        starts = torch.zeros(1, dtype=torch.int64, device="cpu")
        for size, stride in zip(self.shape, self.strides, strict=True):
            starts = (starts[:, None] + torch.arange(size, device="cpu") * (stride * self.itemsize)).flatten()
        return starts


def region(tensor: Tensor) -> Region:
    """Return where a strided tensor that holds at least one element lies."""
    begin = _address(tensor)
    if tensor.is_contiguous():
        return Region(begin, begin + tensor.nbytes, 1)
    dims = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    itemsize = tensor.element_size()
    end = begin + itemsize * (1 + sum(stride * (size - 1) for stride, size in dims))
    if end - begin == tensor.nbytes and _grows(dims):
        return Region(begin, end, 1)
    return Region(begin, end, itemsize, tuple(size for _, size in dims), tuple(stride for stride, _ in dims))


def _address(tensor: Tensor) -> int:
    offset = int(tensor.storage_offset()) * tensor.element_size()
    handle = tensor.data_ptr() - offset
    if not handle:
        # A subclass that wraps other tensors, or a meta tensor: without memory it is known as itself alone.
        return -id(tensor) << 64
    # Elsewhere a pointer may be a handle: two storages are then apart, however near their handles are.
    return handle + offset if is_addressed(tensor) else (handle << 64) + offset


def is_addressed(tensor: Tensor) -> bool:
    """Whether a pointer is an address in one space on the tensor's device, and not a handle."""
    return tensor.is_cpu or tensor.is_cuda


def is_gapless(tensor: Tensor) -> bool:
    """Whether a strided tensor that holds an element fills the span that it lies in, each byte once."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    return not region(tensor).shape


def are_gapless(places: Spans | Sequence[Region]) -> bool:
    """Whether what lies there fills each span."""
    return isinstance(places, tuple) or not any(place.shape for place in places)


def extent(places: Spans | Sequence[Region]) -> int:
    """Return the bytes from begin to end of each place, together."""
    if isinstance(places, tuple):
        return sum(places[1]) - sum(places[0])
    return sum(place.end - place.begin for place in places)


def stored(tensor: Tensor) -> Tensor:
    """Return a view without the repetitions of an expanded tensor: every stored element once."""
    if 0 not in tensor.stride() or tensor.is_contiguous():
        return tensor
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def overlaps_itself(place: Region) -> bool:
    """Whether two elements of one tensor share memory."""
    if not place.shape or _grows(list(zip(place.strides, place.shape, strict=True))):
        return False
    starts = place.elements()
    return bool((torch.sort(starts).values.diff() == 0).any())


def are_apart(spans: Spans) -> bool:
    """Whether spans, none of them empty, share nothing."""
    begins, ends = map(sorted, spans)
    return all(map(operator.le, ends, begins[1:]))


def first_overlap(places: Iterable[Region]) -> tuple[Region, Region] | None:
    """Return two regions that share bytes without being the same memory, or None."""
    for cluster in _clusters(sorted(set(places))):
        # All of them at once, since columns of one matrix all meet each other; which two is asked after that.
        if len(cluster) > 1 and _share_bytes(cluster):
            return next(pair for pair in itertools.combinations(cluster, 2) if _share_bytes(pair))
    return None


def _clusters(places: Iterable[Region]) -> Iterator[list[Region]]:
    """Yield sorted regions in groups that share no byte with each other: each begins where all others end."""
    cluster: list[Region] = []
    end = 0
    for place in places:
        if cluster and place.begin >= end:
            yield cluster
            cluster = []
        end = max(end, place.end) if cluster else place.end
        cluster.append(place)
    if cluster:
        yield cluster


def _share_bytes(places: Sequence[Region]) -> bool:
    """Whether two of some sorted regions share bytes: each is marked in turn where none was marked before."""
    origin = places[0].begin
    # Nearly always the size of an element, so that one mark stands for all bytes of it.
    sizes = (place.itemsize if place.shape else place.end - place.begin for place in places)
    unit = math.gcd(*sizes, *(place.begin - origin for place in places))
    taken = torch.zeros((max(place.end for place in places) - origin) // unit, dtype=torch.bool, device="cpu")
    for place in places:
        marks = list(_marks(taken, place, origin, unit))
        if any(bool(mark.any()) for mark in marks):
            return True
        for mark in marks:
            mark.fill_(True)
    return False


def _marks(taken: Tensor, place: Region, origin: int, unit: int) -> Iterator[Tensor]:
    """Yield views of ``taken`` that together hold one mark for each unit of a region."""
    begin, end = (place.begin - origin) // unit, (place.end - origin) // unit
    if not place.shape:
        yield taken[begin:end]
        return
    width = place.itemsize // unit
    strides = [stride * width for stride in place.strides]
    yield from (taken.as_strided(place.shape, strides, begin + more) for more in range(width))


def _grows(dims: list[tuple[int, int]]) -> bool:
    """Whether each (stride, size), from the smallest stride on, steps over all that lies below it."""
    reach = 0
    for stride, size in sorted(dims):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
