"""What is known of a skipped step, and the verdict over it.

Knows small tensors that were left on their device and reads them when asked, once. Refuses to know scalers
and modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lucid.amp._causes import Counts, NonFinite
from lucid.amp.diagnosis._kinds import Kind

if TYPE_CHECKING:
    from lucid.amp.diagnosis._trace import Grown, Trace

__all__ = ["Pass", "Skip"]


@dataclass
class Pass:
    """One ``scale`` and the backward that follows it.

    Attributes:
        losses: the largest magnitude of each tensor that was scaled, zero-dimensional, on its device.
        before: for parameters by their ids, sums over the gradients that they had before this backward; none
            where those are known to be finite.
        half: whether a loss was float16.
        largest: the largest magnitude of the losses, once it was read.
    """

    losses: list[Tensor]
    before: list[tuple[list[int], Tensor]] = field(default_factory=list)
    half: bool = False
    largest: float | None = None

    def loss(self) -> float:
        """The largest magnitude that was scaled: inf or NaN where one was not finite. Reads it at first."""
        if self.largest is None:
            self.largest = _largest(loss.item() for loss in self.losses)
            self.losses = []
        return self.largest

    def was_finite_before(self, parameters: set[int]) -> bool:
        """Whether the gradients that these had before this backward were finite. Reads it."""
        for ids, sums in self.before:
            for one, total in zip(ids, sums.tolist(), strict=True):
                if one in parameters and not math.isfinite(total):
                    return False
        return True


@dataclass
class Skip:
    """One skipped step.

    Attributes:
        update: the number of the update that ended its iteration, from 0.
        scale: the scale that was in force.
        optimizer: the name of the optimizer's class.
        parameters: the ids of its parameters.
        counts: the gradients that were not finite.
        passes: what was scaled since the last update.
        watched: whether a model with any of its parameters was watched.
        trace: what replaying the forward told, where it was run again.
        grown: the weight that has grown most since the watch began, if that is beyond use.
        order: the names of the modules in forward order, where a watch knows them.
        notes: what a reader must know besides.
        move: what would tell more than is known, as a sentence; empty where nothing does.
    """

    update: int
    scale: float
    optimizer: str
    parameters: set[int]
    counts: Counts
    passes: list[Pass] = field(default_factory=list)
    watched: bool = False
    trace: Trace | None = None
    grown: Grown | None = None
    order: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    move: str = ""
    _verdict: tuple[Kind, int] | None = None

    def gradients(self) -> tuple[NonFinite, ...]:
        """The gradients that were not finite, in the optimizer's order. Reads them at first."""
        return self.counts.read()

    def verdict(self) -> tuple[Kind, int]:
        """The kind, and which pass it happened in (from 0). Reads what it needs at first."""
        if self._verdict is None:
            self._verdict = self._judge()
        return self._verdict

    def _judge(self) -> tuple[Kind, int]:
        if not self.passes:
            return Kind.UNKNOWN, 0
        last = len(self.passes) - 1
        broken = (n for n, one in enumerate(self.passes) if not one.was_finite_before(self.parameters))
        # What was bad before a backward went bad in the one before it, or, for the first, in the last iteration.
        culprit = next(broken, last + 1) - 1
        if culprit < 0:
            return Kind.STALE, 0
        # Where nobody looks at these gradients, any loss may be to blame.
        for number in (culprit,) if self.watched else range(last + 1):
            if not math.isfinite(self.passes[number].loss()):
                return Kind.LOSS, number
        if not self.gradients():
            return Kind.RANK, last
        return (Kind.EARLIER if culprit < last else Kind.BACKWARD), culprit


def _largest(numbers: Iterable[complex]) -> float:
    """The largest magnitude; NaN if one is NaN, which Python's ``max`` would lose."""
    magnitudes = [abs(number) for number in numbers]
    return math.nan if any(map(math.isnan, magnitudes)) else max(magnitudes, default=0.0)
