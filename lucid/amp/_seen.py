"""Which tensors were dealt with in this iteration.

Knows tensors as objects and as memory. Refuses to know what was done with them. What it keeps about a tensor is numbers
and a weak reference, so that it keeps no memory alive.
"""

from __future__ import annotations

import bisect
import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lucid.amp._memory import Region, Spans, are_apart, region, stored

_BEGIN, _END = operator.itemgetter(0), operator.itemgetter(1)

_FEW = 16
"""Spans of fewer tensors are sorted in, or looked up, one by one: fewer steps than to sort all again."""


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

        False says nothing. A thousand optimizers cost a thousand times what one does.
        """
        if not self._index_spans():
            return False
        if not self._by_id.keys().isdisjoint(map(id, tensors)) and any(map(self._is_known, tensors)):
            return False
        return (len(tensors) >= _FEW and self._are_apart_from(spans)) or self._is_each_apart(spans)

    def _are_apart_from(self, spans: Spans) -> bool:
        """Whether spans and all that was added, also of tensors that are gone, lie apart: sorted together."""
        begins, ends = spans
        return are_apart(([*map(_BEGIN, self._sorted), *begins], [*map(_END, self._sorted), *ends]))

    def _is_each_apart(self, spans: Spans) -> bool:
        """Whether each span is apart from all living ones: looked up one by one."""
        for begin, end in zip(*spans, strict=True):
            spot = bisect.bisect_left(self._sorted, end, key=_BEGIN)
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
        if self._with_regions or self._with_spans:
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
            if len(tensors) < _FEW:
                for span in zip(*places, tensors, strict=True):
                    bisect.insort(self._sorted, span, key=_BEGIN)
            else:
                self._sorted.extend(zip(*places, tensors, strict=True))
                self._sorted.sort(key=_BEGIN)
            self._with_spans += 1
        return True

    def _note_ids(self, tensors: Sequence[weakref.ref[Tensor]]) -> None:
        # One that is gone is noted under None's id, where nobody looks.
        self._by_id.update(zip(map(id, [tensor() for tensor in tensors]), tensors, strict=True))


def _lies_at(place: Region, tensor: Tensor | None) -> bool:
    """Whether a tensor lives and was not moved since (``tensor.data = ...``): its old memory may be another's now."""
    if tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor is not None
    return tensor.numel() > 0 and region(stored(tensor)) == place
