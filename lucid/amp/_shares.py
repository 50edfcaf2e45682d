"""Which of this rank's gradients count in a norm over all ranks: every value of the model once.

Knows placements and groups. Refuses to know norms, scales and what is exchanged.

A DTensor tells: along a dimension that shards it every rank counts its part, along one that replicates it only the
first does. A plain tensor beside DTensors is a replica. Along a group that the user gave nothing tells whether
plain tensors are parts or replicas, so the ranks compare them: values that several hold count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lucid.amp import _division, _meshes

if TYPE_CHECKING:
    from lucid.amp._meshes import Group

UNCLEAR, PARTIAL = 1, 2
"""Questions that ranks ask together: who holds these values too, and what is the sum of these addends."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Part(NamedTuple):
    """A gradient on this rank: its parameter, its values, and whether they are still multiplied by the scale."""

    parameter: Tensor
    values: Tensor
    scaled: bool


class Ranks(Protocol):
    """The two questions that :class:`Shares` asks other ranks."""

    def are_first(self, groups: Sequence[Group], look: Callable[[], Sequence[object]]) -> list[bool]:
        """Whether no lower rank of any group has each of the marks that are seen."""

    def summed(self, addends: Any) -> Tensor:
        """This rank's values of a DTensor after the addends of all ranks were added."""


class Shares:
    """The gradients of one optimizer on this rank, sorted by who counts them.

    Attributes:
        counted: what this rank counts.
        rest: what another rank counts, or what a question must decide first.
        questions: UNCLEAR and PARTIAL, as this rank needs them.
    """

    def __init__(self, parts: Iterable[Part], groups: Sequence[Group], given: Sequence[Group]) -> None:
        self._given = [group for group in groups if group in given]
        self._told = [group for group in groups if group not in given]
        self.counted: list[Part] = []
        self.rest: list[Part] = []
        self._unclear: list[Part] = []
        self._partial: list[Part] = []
        for part in parts:
            self._sort(part)
        self.questions = UNCLEAR * bool(self._unclear) | PARTIAL * bool(self._partial)

    def resolve(self, questions: int, ranks: Ranks) -> list[Part]:
        """Return what else this rank counts, once all ranks have asked the questions of any of them."""
        counted = []
        for part in self._partial:
            values = ranks.summed(part.parameter.grad)
            if _is_first(part.parameter):
                counted.append(part._replace(values=values))
        if not questions & UNCLEAR:
            return counted
        unclear = self._unclear + [part for part in counted if self._is_unclear(part)]
        first = ranks.are_first(self._given, lambda: [_mark(part) for part in unclear])
        copies = {id(part) for part, is_first in zip(unclear, first, strict=True) if not is_first}
        return [part for part in (*self._unclear, *counted) if id(part) not in copies]

    def _sort(self, part: Part) -> None:
        if _meshes.is_partial(part.parameter.grad):
            self._partial.append(part)
            self.rest.append(part)
        elif not _is_first(part.parameter) or not self._represents(part):
            self.rest.append(part)
        elif self._is_unclear(part):
            self._unclear.append(part)
            self.rest.append(part)
        else:
            self.counted.append(part)

    def _represents(self, part: Part) -> bool:
        """Whether this rank stands for those on which the mesh of other parameters replicates this one."""
        members = _meshes.members(part.parameter.grad)
        return all(min(_meshes.ranks(group)) in members for group in self._told)

    def _is_unclear(self, part: Part) -> bool:
        members = _meshes.members(part.parameter.grad)
        return not all(members.issuperset(_meshes.ranks(group)) for group in self._given)


def _is_first(parameter: Tensor) -> bool:
    return _meshes.is_first_replica(parameter.grad)


def _mark(part: Part) -> tuple[object, ...]:
    """What replicas have in common and parts of a model have not: the bits of gradient and parameter, summed."""
    tensors = [part.values, _meshes.local(part.parameter.detach())]
    return (tuple(part.values.shape), str(part.values.dtype), *(number for t in tensors for number in _sums(t)))


def _sums(tensor: Tensor) -> list[int]:
    """The sum of the bits, taken as integers modulo 2⁶⁴, and that of their squares."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for pieces in _division.pieces([tensor]):
        for piece in pieces:
            bits = piece.contiguous().view(-1).view(_BITS[piece.element_size()]).to(torch.int64)
            sums += torch.stack([bits.sum(), (bits * bits).sum()])
    return [int(number) for number in sums.tolist()]
