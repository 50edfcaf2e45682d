"""What happened to a scaler's steps and updates, kept for those who ask and told to those who listen.

Knows updates, the turns of optimizers with their answers, and listeners. Refuses to know how anything was decided.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lucid._warning import warn
from lucid.amp import _causes
from lucid.amp._alarm import Alarm
from lucid.amp._gradients import Gradient
from lucid.amp._schedule import ScaleUpdate
from lucid.amp._stages import Stages

Hook = Callable[..., None]

_LOSSES = 1024
"""So many losses of an iteration are remembered, weakly, to tell whether a skip began in one."""


class Skipped(NamedTuple):
    """A skipped step: whose, at which scale, with what its device still has to tell.

    ``losses`` holds the largest magnitude of each loss of the iteration; None where that would not tell the cause.
    """

    optimizer: str
    scale: float
    counts: _causes.Counts
    losses: list[Tensor] | None


class Events:
    """The part of a scaler that can be asked and listened to."""

    def __init__(self) -> None:
        self._stages = Stages()
        self._updates = 0
        self._last_update: ScaleUpdate | tuple[Any, ...] | None = None
        self._alarm = Alarm()
        self._skips: list[Skipped] = []
        self._scaled: deque[weakref.ref[Tensor]] = deque(maxlen=_LOSSES)
        self._left_over: dict[int, weakref.ref[Tensor]] = {}
        self._update_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._scale_observers: OrderedDict[int, Hook] = OrderedDict()
        self._skip_observers: OrderedDict[int, Hook] = OrderedDict()

    @property
    def last_update(self) -> ScaleUpdate | None:
        """What the last ``update()`` did; None before the first one, and while disabled."""
        # Few ask, so the record is made for the first one who does.
        if isinstance(self._last_update, tuple):
            self._last_update = ScaleUpdate(*self._last_update)
        return self._last_update

    def step_was_skipped(self, optimizer: Any) -> bool:
        """Whether that optimizer's last ``step`` through this scaler was skipped.

        Answerable until its next ``step``, also after ``update``; a ``step`` that raised changes nothing. So a
        scheduler is gated by ``if not scaler.step_was_skipped(optimizer): scheduler.step()``.

        Raises:
            RuntimeError: it was never stepped here.
        """
        return self._stages.skipped(optimizer)

    def register_update_hook(self, hook: Callable[[Any, ScaleUpdate], None]) -> RemovableHandle:
        """Call ``hook(scaler, update)`` at the end of each ``update()``, the new scale being in force.

        Returns:
            A handle; its ``remove()`` takes the hook away.
        """
        return _registered(self._update_hooks, hook)

    def _observe_scale(self, observer: Hook) -> RemovableHandle:
        """Call ``observer(scaler, outputs)`` at each ``scale(outputs)``."""
        return _registered(self._scale_observers, observer)

    def _observe_skip(self, observer: Hook) -> RemovableHandle:
        """Call ``observer(scaler, optimizer, gradients)`` at each skip, before anything can clear them."""
        return _registered(self._skip_observers, observer)

    def _tell_scaled(self, outputs: Any) -> None:
        for observer in list(self._scale_observers.values()):
            observer(self, outputs)

    def _tell_skipped(self, optimizer: Any, gradients: Sequence[Gradient], scale: float, first: bool) -> None:
        """Launch the counts of a skip, the first one or a further one of its iteration, and tell the observers."""
        if first:
            self._skips = []
        losses = None if self._may_be_left_over(gradients) else self._largest_losses()
        self._skips.append(Skipped(type(optimizer).__name__, scale, _causes.count(gradients), losses))
        self._left_over.update((id(gradient.tensor), weakref.ref(gradient.tensor)) for gradient in gradients)
        for observer in list(self._skip_observers.values()):
            observer(self, optimizer, gradients)

    def _largest_losses(self) -> list[Tensor] | None:
        """Launch the largest magnitude of each loss of this iteration; None where one is gone."""
        losses = [loss for scaled in self._scaled if (loss := scaled()) is not None]
        if not losses or len(losses) < len(self._scaled):
            return None
        with torch.no_grad():
            return [torch.linalg.vector_norm(loss.float(), math.inf) for loss in losses if loss.numel()]

    def _may_be_left_over(self, gradients: Sequence[Gradient]) -> bool:
        """Whether a gradient is the very tensor that an earlier skip left: what made it infinite may be older."""
        return any(self._left_over.get(id(one.tensor)) is weakref.ref(one.tensor) for one in gradients)

    def _note_update(
        self, scale: float, new_scale: float, overflow: bool, skipped: tuple[bool, ...], given: bool
    ) -> None:
        """Keep what an update did, and tell those who listen; ``given`` if the user set the new scale."""
        self._scaled.clear()
        self._last_update = (self._updates, scale, new_scale, overflow, skipped)
        self._updates += 1
        if self._left_over and not overflow:
            self._left_over.clear()
        if overflow or self._update_hooks:
            update = self._last_update = ScaleUpdate(*self._last_update)
            self._tell_updated(update, given)

    def _tell_updated(self, update: ScaleUpdate, given: bool) -> None:
        try:
            for message in self._alarm.messages(update, self._names_not_finite, given):
                warn(message)
        finally:  # where warnings are errors, too
            for hook in list(self._update_hooks.values()):
                hook(self, update)

    def _names_not_finite(self) -> list[str]:
        """What was not finite at the last skip, with the optimizer that it belongs to where there are several."""
        several = self.last_update is not None and len(self.last_update.skipped) > 1
        owners = [f"{owner}: " if several else "" for owner in _told_apart([skip.optimizer for skip in self._skips])]
        skips = zip(owners, self._skips, strict=True)
        return [owner + cause.name for owner, skip in skips for cause in skip.counts.read()]


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names of classes, with a number where one comes more than once."""
    return [
        f"{name} {names[: place + 1].count(name)}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def _registered(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    if not callable(hook):
        raise TypeError(f"a hook must be callable, got {hook!r} of type {type(hook).__name__}")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
