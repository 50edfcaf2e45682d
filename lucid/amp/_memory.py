"""Where tensors lie in memory, which of them are the same memory, and which overlap in part.

Knows addresses, shapes and strides. Refuses to know values, gradients and optimizers. What it keeps about a
tensor is numbers and a weak reference, so that it keeps no memory alive.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

ADDRESSED = {"cpu", "cuda"}
"""The devices on which a pointer is an address in one space, and not a handle."""


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
    return handle + offset if tensor.device.type in ADDRESSED else (handle << 64) + offset


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


Spans: TypeAlias = tuple[list[int], list[int]]
"""Where tensors begin and where they end, each of which fills its span: addresses, in the tensors' order."""


def are_apart(spans: Spans) -> bool:
    """Whether spans, none of them empty, share nothing: both lists sorted, each end comes before the next begin."""
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


class Seen:
    """The tensors that were dealt with in this iteration, known until ``clear``.

    A tensor is known as an object, or as living memory: an address alone is not enough, since the allocator
    hands the same one out again.

    Attributes:
        added: what was added, call by call: weak references, and where the tensors lay then.
    """

    def __init__(self) -> None:
        self.added: list[tuple[list[weakref.ref[Tensor]], Spans | Sequence[Region]]] = []
        self._by_id: dict[int, weakref.ref[Tensor]] = {}
        self._by_region: dict[Region, list[weakref.ref[Tensor]]] = {}
        self._with_regions = 0
        self._sorted: list[tuple[int, int, weakref.ref[Tensor]]] = []
        self._with_spans = 0

    def add(self, tensors: Sequence[Tensor], places: Spans | Sequence[Region]) -> None:
        """Remember tensors, and where their values lie."""
        self.added.append((list(map(weakref.ref, tensors)), places))

    def has(self, tensor: Tensor, place: Region) -> bool:
        """Whether that tensor, or a living one of the same memory, was added."""
        self._index_regions()
        return self._is_known(tensor) or any(_lies_at(place, other()) for other in self._by_region.get(place, ()))

    def regions(self) -> list[Region]:
        """Return where the living ones lie."""
        self._index_regions()
        return [
            place for place, tensors in self._by_region.items() if any(_lies_at(place, tensor()) for tensor in tensors)
        ]

    def has_none_of(self, tensors: Sequence[Tensor], spans: Spans) -> bool:
        """Whether tensors that lie apart in spans are known, at a glance, to be none of these and apart from all.

        False says nothing. Each span is looked up, so that a thousand optimizers cost a thousand times what one does.
        """
        if not self._index_spans():
            return False
        if not self._by_id.keys().isdisjoint(map(id, tensors)) and any(map(self._is_known, tensors)):
            return False
        for begin, end in zip(*spans, strict=True):
            spot = bisect.bisect_left(self._sorted, (end,))
            while spot and self._sorted[spot - 1][1] > begin:
                spot -= 1
                if self._sorted[spot][2]() is not None:
                    return False
                # The allocator hands out again what a tensor that is gone has left.
                del self._sorted[spot]
        return True

    def clear(self) -> None:
        """Forget all of them."""
        self.added.clear()
        if self._by_id:
            self._by_id.clear()
            self._by_region.clear()
            self._sorted.clear()
            self._with_regions = self._with_spans = 0

    def _is_known(self, tensor: Tensor) -> bool:
        # A living object has one plain weak reference, so that `is` compares the objects.
        return self._by_id.get(id(tensor)) is weakref.ref(tensor)

    def _index_regions(self) -> None:
        # Only a second optimizer asks, so the dicts are made when it does.
        for tensors, places in self.added[self._with_regions :]:
            if isinstance(places, tuple):
                places = [Region(begin, end, 1) for begin, end in zip(*places, strict=True)]
            self._note_ids(tensors)
            for tensor, place in zip(tensors, places, strict=True):
                self._by_region.setdefault(place, []).append(tensor)
        self._with_regions = len(self.added)

    def _index_spans(self) -> bool:
        """Take up what came since, and tell whether all that was added lies apart in spans."""
        for tensors, places in self.added[self._with_spans :]:
            if not isinstance(places, tuple):
                return False
            self._note_ids(tensors)
            self._sorted.extend(zip(*places, tensors, strict=True))
            self._sorted.sort(key=operator.itemgetter(0))
            self._with_spans += 1
        return True

    def _note_ids(self, tensors: Sequence[weakref.ref[Tensor]]) -> None:
        self._by_id.update((id(living), tensor) for tensor in tensors if (living := tensor()) is not None)


def _lies_at(place: Region, tensor: Tensor | None) -> bool:
    """Whether a tensor lives and was not moved since (``tensor.data = ...``): its old memory may be another's now."""
    if tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor is not None
    return tensor.numel() > 0 and region(stored(tensor)) == place
