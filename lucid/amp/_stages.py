"""Ready → unscaled → stepped: what each optimizer may do next in this iteration, and what it did last.

Knows optimizers as objects that are the same or not the same. Refuses to know tensors: an optimizer's
overflow is whatever the caller stored, and reading it is the caller's.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping
from typing import Any


class Stage(enum.Enum):
    """How far an optimizer has come since the last ``update``."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class Turn:
    """One optimizer's part in one iteration.

    Attributes:
        stage: how far it has come.
        by_step: whether it was a step that unscaled, and not the user.
        overflow: its verdict, as the caller stored it.
        skipped: whether its step was skipped.
    """

    __slots__ = ("_find", "_type", "by_step", "overflow", "skipped", "stage")

    def __init__(self, optimizer: object) -> None:
        self._find = _reference(optimizer)
        self._type = type(optimizer)
        self.stage = Stage.READY
        self.by_step = False
        self.overflow: Any = False
        self.skipped = False

    def belongs_to(self, optimizer: object) -> bool:
        """Whether this is the turn of that very object."""
        return self._find() is optimizer

    def may_unscale(self) -> None:
        """Raise RuntimeError unless the gradients are still scaled."""
        if self.stage is Stage.UNSCALED:
            raise RuntimeError(
                f"unscale_() already ran for this {self._type.__name__} since the last update(); its gradients hold "
                "their true values. Call step(optimizer) next, or update() to give this iteration up."
            )
        if self.stage is Stage.STEPPED:
            raise RuntimeError(
                f"unscale_() came after step() for this {self._type.__name__}. Call unscale_() between backward() and "
                "step(), and update() before the next iteration."
            )

    def may_step(self) -> None:
        """Raise RuntimeError if this optimizer was stepped already."""
        if self.stage is Stage.STEPPED:
            raise RuntimeError(
                f"step() already ran for this {self._type.__name__} since the last update(). Call update() once after "
                "the steps of an iteration, then step again."
            )


def refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a closure in either place; None is no closure, trainers pass it."""
    if kwargs.get("closure") is not None or (args and callable(args[0])):
        raise RuntimeError(
            "step() takes no closure while the scaler is enabled: it would run backward() again, and those gradients "
            "would never be unscaled. Run the closure's forward and backward before step(), without passing it. "
            "Nothing was changed."
        )


class Stages:
    """The turns of the iteration in progress, in the order of the optimizers' first calls.

    An optimizer is the object itself, compared with ``is``. It is held weakly where it allows that, so that
    a scaler keeps none alive; the turn of an optimizer that is gone stays until ``clear``.
    """

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._by_id: dict[int, Turn] = {}

    def of(self, optimizer: object) -> Turn:
        """Return the optimizer's turn; it is new at the first call in an iteration."""
        turn = self._by_id.get(id(optimizer))
        # An id is used again once its object is gone; the object decides.
        if turn is None or not turn.belongs_to(optimizer):
            turn = self._by_id[id(optimizer)] = Turn(optimizer)
            self._turns.append(turn)
        return turn

    def turns(self) -> list[Turn]:
        """Return the turns of all optimizers that got beyond ready."""
        return [turn for turn in self._turns if turn.stage is not Stage.READY]

    def in_progress(self) -> bool:
        """Whether any optimizer is between ready and the next ``clear``."""
        return bool(self.turns())

    def clear(self) -> None:
        """Return every optimizer to ready."""
        self._turns.clear()
        self._by_id.clear()


class Answers:
    """Whether each optimizer's last step was skipped: kept until its next step, also across iterations."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Callable[[], object], bool]] = {}

    def remember(self, optimizer: object, skipped: bool) -> None:
        """Keep the answer about the step that ended just now."""
        known = self._by_id.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            self._forget_the_gone()
            known = (_reference(optimizer), skipped)
        self._by_id[id(optimizer)] = (known[0], skipped)

    def skipped(self, optimizer: object) -> bool:
        """Return the answer; RuntimeError for an optimizer that was never stepped here."""
        find, skipped = self._by_id.get(id(optimizer), (None, False))
        if find is None or find() is not optimizer:
            raise RuntimeError(
                f"this {type(optimizer).__name__} was never stepped through this scaler. Ask about the very object "
                "that was given to step(), after step()."
            )
        return skipped

    def _forget_the_gone(self) -> None:
        self._by_id = {key: known for key, known in self._by_id.items() if known[0]() is not None}


def _reference(optimizer: object) -> Callable[[], object]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # an object with __slots__ and no __weakref__
        return lambda: optimizer
