"""Which tensors were dealt with in this iteration.

Knows tensors as objects and as memory. Refuses to know what was done with them. What it keeps about a tensor is numbers
and a weak reference, so that it keeps no memory alive.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lucid.amp._memory import Region, Spans, are_apart, region, stored

_FEW = 4
"""So many optimizers are compared with another one without an index."""

_TIMES = 16
"""Where more than so many times as many are known, tensors are looked up, or sorted in, one by one."""


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
        # Spans that lie apart, so that the one that begins first also ends first.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._by_begin: dict[int, weakref.ref[Tensor]] = {}
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
        if len(self.added) <= _FEW and self._are_all_apart(tensors, spans):
            return True
        if not self._index_spans():
            return False
        if not self._by_id.keys().isdisjoint(map(id, tensors)) and any(map(self._is_known, tensors)):
            return False
        return (self._are_many(tensors) and self._are_apart_from(spans)) or self._is_each_apart(spans)

    def _are_all_apart(self, tensors: Sequence[Tensor], spans: Spans) -> bool:
        """The same for a few optimizers: all are compared at once, also with what is gone, and nothing is indexed."""
        ids, (begins, ends) = set(map(id, tensors)), map(list, spans)
        for added, places in self.added:
            if not (isinstance(places, tuple) and ids.isdisjoint(map(id, [tensor() for tensor in added]))):
                return False
            begins += places[0]
            ends += places[1]
        return are_apart((begins, ends))

    def _are_many(self, tensors: Sequence[object]) -> bool:
        """Whether to sort all again takes fewer steps than to look them up, or sort them in, one by one."""
        return len(tensors) * _TIMES >= len(self._begins)

    def _are_apart_from(self, spans: Spans) -> bool:
        """Whether spans and all that was added, also of tensors that are gone, lie apart: sorted together."""
        return are_apart((self._begins + spans[0], self._ends + spans[1]))

    def _is_each_apart(self, spans: Spans) -> bool:
        """Whether each span is apart from all living ones: looked up one by one."""
        for begin, end in zip(*spans, strict=True):
            spot = bisect.bisect_left(self._begins, end)
            while spot and self._ends[spot - 1] > begin:
                spot -= 1
                if self._by_begin[self._begins[spot]]() is not None:
                    return False
                # The allocator hands out again what a tensor that is gone has left.
                del self._begins[spot], self._ends[spot]
        return True

    def clear(self) -> None:
        """Forget all of them."""
        self.added.clear()
        if self._with_regions or self._with_spans or self._by_id:
            self._by_id.clear()
            self._by_region.clear()
            self._by_begin.clear()
            self._begins, self._ends = [], []
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
            self._by_begin.update(zip(places[0], tensors, strict=True))
            join = _sorted_together if self._are_many(tensors) else _sorted_in
            begins, ends = map(join, (self._begins, self._ends), places)
            # Together, so that no interrupt leaves one of them longer than the other.
            self._begins, self._ends = begins, ends
            self._with_spans += 1
        return True

    def _note_ids(self, tensors: Sequence[weakref.ref[Tensor]]) -> None:
        # One that is gone is noted under None's id, where nobody looks.
        self._by_id.update(zip(map(id, [tensor() for tensor in tensors]), tensors, strict=True))


def _sorted_together(known: list[int], added: list[int]) -> list[int]:
    return sorted(known + added)


def _sorted_in(known: list[int], added: list[int]) -> list[int]:
    joined = known.copy()
    for place in added:
        bisect.insort(joined, place)
    return joined


def _lies_at(place: Region, tensor: Tensor | None) -> bool:
    """Whether a tensor lives and was not moved since (``tensor.data = ...``): its old memory may be another's now."""
    if tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor is not None
    return tensor.numel() > 0 and region(stored(tensor)) == place
