"""The forwards that can still be run again, and how much memory they may hold.

Knows inputs by reference, and which backward pass since the last update each belongs to. Refuses to know why a
forward is run again, and what it computes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lucid.amp.diagnosis._snapshot import Surroundings
from lucid.amp.diagnosis._trees import tensors_in

__all__ = ["Forward", "Kept"]

AT_MOST = 8
"""So many forwards of one backward are kept."""

BOUND = 256 * 2**20
"""Bytes that the inputs of an update's earlier backward passes may take, where nobody says how many to keep.

Beside what a backward itself needs that is little: as much as weight, gradient and Adam's two moments of 16 million
parameters. It holds a thousand batches of 8×1024 token numbers, and a dozen of 32 photographs of 224×224.
"""

BESIDE = 32 * 2**10
"""Bytes that a forward takes beside its inputs, at most: Python's random state is a tuple of 625 numbers."""


@dataclass
class Forward:
    """One forward of the model, as far as it can be run again.

    Attributes:
        inputs: ``(args, kwargs)``, by reference, without their graph.
        surroundings: the random state and autocast it ran in.
        versions: how often each tensor of the inputs had been changed in place.
        print: a number for each of the first tensors of the output, on the device.
    """

    inputs: tuple[Any, Any]
    surroundings: Surroundings
    versions: list[int | None]
    print: list[Tensor] = field(default_factory=list)

    def nbytes(self) -> int:
        """How much memory it holds, if nobody else holds the inputs."""
        return BESIDE + sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(self.inputs))


class Kept:
    """The forwards of one model since the last update, by backward pass.

    Args:
        backwards: of how many backward passes, the latest ones. None keeps the first ones, where an overflow that
            is met everywhere begins, as far as ``BOUND`` goes, and the latest.

    Attributes:
        open: the forwards that no backward has taken yet, the latest last.
    """

    def __init__(self, backwards: int | None) -> None:
        self._backwards = backwards
        self.open: deque[Forward] = deque(maxlen=AT_MOST)
        self._passes: deque[tuple[int, list[Forward]]] = deque(maxlen=backwards)
        self._held = 0

    def __len__(self) -> int:
        """Of how many backward passes there is something."""
        return len(self._passes)

    def scaled(self, number: int) -> None:
        """What is open belongs to this backward, the ``number``-th since the last update."""
        if number == 0:
            self._passes.clear()
            self._held = 0
        elif self._backwards is None and self._passes:
            self._make_room()
        self._passes.append((number, list(self.open)))
        self.open.clear()

    def of(self, number: int) -> list[Forward] | None:
        """The forwards that led to a backward pass of this update; None where they are not kept.

        A loss without a forward of its own is a further one of the forward before it.
        """
        passes = dict(self._passes)
        while number > 0 and passes.get(number) == []:
            number -= 1
        return passes.get(number)

    def latest(self) -> list[Forward]:
        """The forwards of the latest backward pass."""
        return self._passes[-1][1] if self._passes else []

    def ended(self) -> None:
        """The update is over: only its latest backward pass stays."""
        while len(self._passes) > 1:
            self._passes.popleft()

    def clear(self) -> None:
        """Let go of everything."""
        self.open.clear()
        self._passes.clear()
        self._held = 0

    def _make_room(self) -> None:
        """The latest pass is the latest no more: it stays within the bound, or goes."""
        nbytes = sum(forward.nbytes() for forward in self.latest())
        if self._held + nbytes > BOUND:
            self._passes.pop()
        else:
            self._held += nbytes
