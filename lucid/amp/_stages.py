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


READY, UNSCALED, STEPPED = Stage


class Turn:
    """One optimizer's part in an iteration, and the answer about its last step.

    Attributes:
        find: returns the optimizer; None once it is gone.
        called: whether this iteration knows it.
        stage: how far it has come.
        unscaled_by_step: how many gradients its step unscaled; None where it was the user, or nobody.
        overflow: its verdict, as the caller stored it.
        skipped: whether its last step was skipped, in whichever iteration; None before the first.
    """

    __slots__ = ("_type", "called", "find", "overflow", "skipped", "stage", "unscaled_by_step")

    def __init__(self, optimizer: object) -> None:
        self.find = _reference(optimizer)
        self._type = type(optimizer)
        self.called = False
        self.stage = READY
        self.unscaled_by_step: int | None = None
        self.overflow: Any = False
        self.skipped: bool | None = None

    def may_unscale(self, call: str = "unscale_") -> None:
        """Raise RuntimeError, in the words of the method that was called, unless the gradients are still scaled."""
        if self.stage is UNSCALED:
            raise RuntimeError(
                f"unscale_() already ran for this {self._type.__name__} since the last update(); its gradients hold "
                "their true values. Call step(optimizer) next, or update() to give this iteration up."
            )
        if self.stage is STEPPED:
            raise RuntimeError(
                f"{call}() came after step() for this {self._type.__name__}: update() is missing, or the calls are in "
                f"the wrong order. Call {call}() between backward() and step(), and update() before the next iteration."
            )

    def may_step(self) -> None:
        """Raise RuntimeError if this optimizer was stepped already."""
        if self.stage is STEPPED:
            raise RuntimeError(
                f"step() already ran for this {self._type.__name__} since the last update(). Call update() once after "
                "the steps of an iteration, then step again."
            )


def refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a closure in either place; None is no closure, trainers pass it."""
    if kwargs.get("closure") is not None or (args and callable(args[0])):
        raise RuntimeError(
            "step() takes no closure while the scaler is enabled: it would run backward() again, and those gradients "
            "would never be unscaled. Run the closure's forward and backward before step(), without passing it; an "
            "optimizer that needs one to step, such as LBFGS, needs GradScaler(enabled=False). Nothing was changed."
        )


class Stages:
    """The turns of the iteration in progress, and the answers about earlier ones.

    An optimizer is the object itself, compared with ``is``. It is held weakly where it allows that; the turn of one
    that is gone stays until ``clear``. One that does not allow it is held until ``clear`` and, once it was stepped, for
    good: its answer stays.

    Attributes:
        called: the turns that this iteration knows, in the order of the optimizers' first calls.
    """

    def __init__(self) -> None:
        self.called: list[Turn] = []
        self._by_id: dict[int, Turn] = {}
        self._has_met = False

    def of(self, optimizer: object) -> Turn:
        """Return the optimizer's turn in this iteration, which knows it from now on."""
        turn = self._by_id.get(id(optimizer))
        # An id is used again once its object is gone; the object decides.
        if turn is None or turn.find() is not optimizer:
            turn = self._met(optimizer)
        if not turn.called:
            turn.called = True
            self.called.append(turn)
        return turn

    def turns(self) -> list[Turn]:
        """Return the turns of all optimizers that got beyond ready."""
        return [turn for turn in self.called if turn.stage is not READY]

    def in_progress(self) -> bool:
        """Whether any optimizer is between ready and the next ``clear``."""
        return bool(self.turns())

    def clear(self) -> tuple[bool, ...]:
        """Return every optimizer to ready, and whether the step of each that was not was skipped.

        Who was never stepped is forgotten.
        """
        skipped = []
        for turn in self.called:
            if turn.stage is not READY:
                skipped.append(turn.stage is STEPPED and turn.skipped is True)
                turn.stage, turn.unscaled_by_step = READY, None
            turn.called = turn.overflow = False
        self.called.clear()
        if self._has_met:  # else all of them were stepped before
            self._by_id = {key: turn for key, turn in self._by_id.items() if turn.skipped is not None}
            self._has_met = False
        return tuple(skipped)

    def landed(self, optimizer: object, turn: Turn) -> None:
        """Note that a step landed."""
        if turn.called:
            turn.stage, turn.skipped = STEPPED, False
        else:  # a hook of the step has updated, and so ended the iteration
            self.remember(optimizer, skipped=False)

    def remember(self, optimizer: object, skipped: bool) -> None:
        """Keep the answer about a step that belongs to no iteration."""
        (self._known(optimizer) or self._met(optimizer)).skipped = skipped

    def skipped(self, optimizer: object) -> bool:
        """Return whether its last step was skipped; RuntimeError for an optimizer that was never stepped here."""
        turn = self._known(optimizer)
        if turn is None or turn.skipped is None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} was never stepped through this scaler. Ask about the very object "
                "that was given to step(), after step()."
            )
        return turn.skipped

    def _known(self, optimizer: object) -> Turn | None:
        turn = self._by_id.get(id(optimizer))
        return turn if turn is not None and turn.find() is optimizer else None

    def _met(self, optimizer: object) -> Turn:
        # A loop that makes optimizers must not make the scaler grow.
        self._by_id = {key: turn for key, turn in self._by_id.items() if turn.find() is not None}
        turn = self._by_id[id(optimizer)] = Turn(optimizer)
        self._has_met = True
        return turn


def _reference(optimizer: object) -> Callable[[], object]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # an object with __slots__ and no __weakref__
        return lambda: optimizer
