"""Hear what a gradient scaler does, whichever scaler it is: scaled, dividing, overflowed, skipped, updated.

Knows lucid's scaler (which has observer points of its own) and PyTorch's (whose instance gets stand-ins for
four methods while somebody listens), and turns both into the same events. Refuses to know what an event
means, and never changes a loss, a gradient, a parameter or a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lucid.amp.diagnosis._taps import Heard, SeenGradient, Taps, TorchTaps, gradients_of

if TYPE_CHECKING:
    from lucid.amp._schedule import ScaleUpdate

__all__ = ["Handle", "Listener", "SeenGradient", "listen"]


class Listener:
    """What one may want to hear of a scaler; every method is optional.

    A subclass overrides what it wants to hear. Any other object with some of these methods will do as well.
    What is not heard costs nothing. Methods are called on the thread that called the scaler, after the scaler
    has done its own work; what they raise reaches the training script. They must not change a tensor.
    """

    def scaled(self, scaler: Any, outputs: Any) -> None:
        """``scaler.scale(outputs)`` was called; ``outputs`` are the tensors as they were given, unscaled."""

    def dividing(self, scaler: Any, optimizer: Any) -> None:
        """An optimizer's gradients, still multiplied by the scale, are about to be divided: once an iteration.

        Told by whichever of ``unscale_``, ``step`` and lucid's ``clip_grad_norm_`` comes first.
        """

    def overflowed(self, scaler: Any, optimizer: Any, gradients: Sequence[SeenGradient]) -> None:
        """A call of ``unscale_(optimizer)`` found an overflow that ``step`` will skip later.

        Told before the script can clip: clipping by a norm that is not finite turns every gradient into NaN,
        so this is the last moment at which one can see where an overflow began. For PyTorch's scaler this
        costs one pass over the gradients and one host read per ``unscale_`` that the script itself calls; for
        lucid's it is the read that ``step`` makes anyway, made earlier.
        """

    def skipped(self, scaler: Any, optimizer: Any, gradients: Sequence[SeenGradient]) -> None:
        """``step(optimizer)`` was skipped; the gradients are those that the optimizer did not get.

        A fused optimizer under PyTorch's scaler is called even on an overflow and skips inside its own
        kernel: that is a skip as well, and costs one host read per step to know.
        """

    def ended(self, scaler: Any, index: int) -> None:
        """``update()`` was called for the ``index``-th time (from 0). Nothing was read from a device."""

    def updated(self, scaler: Any, update: ScaleUpdate) -> None:
        """``update()`` was called and the new scale is in force.

        For PyTorch's scaler this costs two host reads of the scale per update, before it and after it;
        ``update.index`` counts the updates since the first listener came.
        """


class Handle:
    """Ends a listening: by ``remove()``, or at the end of a ``with`` block. A second ``remove`` does nothing."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Stop listening, and leave the scaler as it was found."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def listen(scaler: Any, listener: Any) -> Handle:
    """Tell ``listener`` what ``scaler`` does, until the handle that comes back is removed.

    The run stays bit for bit what it is without a listener. A method that the script fetched from PyTorch's
    scaler before (``step = scaler.step``) is not heard, and a ``scale`` of lucid's inside compiled code is heard
    once, while it is traced. A disabled scaler is silent. Listeners are not copied or pickled with the scaler.

    Args:
        scaler: ``lucid.amp.GradScaler``, or PyTorch's: ``torch.amp.GradScaler`` (also called
            ``torch.GradScaler``), ``torch.cuda.amp.GradScaler``, FSDP's ``ShardedGradScaler``, or a subclass.
        listener: an object with some of the methods of :class:`Listener`.

    Returns:
        A handle with ``remove()`` that is also a context manager.

    Raises:
        TypeError: ``scaler`` is no scaler, or ``listener`` hears none of the events.
    """
    heard = _heard_by(listener)
    if not heard:
        raise TypeError(f"{type(listener).__name__} hears nothing: give it one of the methods {', '.join(EVENTS)}")
    # First, because lucid's may stand in for PyTorch's under that very name.
    if hasattr(type(scaler), "_observe_skip"):
        return _listen_to_lucid(scaler, heard)
    if isinstance(scaler, torch.amp.GradScaler):
        return Handle(TorchTaps.on(scaler).add(heard))
    raise TypeError(
        f"listen() was given a {type(scaler).__name__}; it takes lucid.amp.GradScaler or torch.amp.GradScaler. "
        "Where a trainer wraps its scaler, pass the scaler inside."
    )


EVENTS = tuple(name for name in vars(Listener) if not name.startswith("_"))


def _heard_by(listener: Any) -> Heard:
    """The listener's own methods: not those that it inherited empty, so that nobody works to tell them."""
    return {
        event: getattr(listener, event)
        for event in EVENTS
        if callable(getattr(listener, event, None))
        and getattr(type(listener), event, None) is not getattr(Listener, event)
    }


def _listen_to_lucid(scaler: Any, heard: Heard) -> Handle:
    """Fasten a listener to the observer points that lucid's scaler has."""
    handles: list[Any] = []
    for event, observe in (("scaled", scaler._observe_scale), ("skipped", scaler._observe_skip)):
        if event in heard:
            handles.append(observe(heard[event]))

    taps = _LucidTaps.on(scaler) if "overflowed" in heard or "dividing" in heard else None
    if taps is not None:
        handles.append(Handle(taps.add(heard)))

    def hook(scaler: Any, update: ScaleUpdate) -> None:
        """Tell both events of an update."""
        if taps is not None:
            taps.end()
        for event, fact in (("ended", update.index), ("updated", update)):
            if event in heard:
                heard[event](scaler, fact)

    if "ended" in heard or "updated" in heard or "dividing" in heard:
        handles.append(scaler.register_update_hook(hook))

    def undo() -> None:
        """Unfasten all."""
        for handle in handles:
            handle.remove()

    return Handle(undo)


class _LucidTaps(Taps):
    """The stand-ins on lucid's scaler, for the events that it has no observer points for."""

    NAMES = ("unscale_", "step", "clip_grad_norm_")

    def on_unscale_(self, method: Callable[..., Any], optimizer: Any) -> Any:
        """Unscale; then tell an overflow. The read is the one that ``step`` would make, and makes no more."""
        self.begin(optimizer)
        result = method(optimizer)
        if self.heard("overflowed") and self.scaler._unscaling.overflowed(self.scaler._stages.of(optimizer)):
            self.tell("overflowed", optimizer, tuple(gradients_of(optimizer)))
        return result

    def on_step(self, method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step, or unscale and clip; before it, tell that gradients are divided, if nothing else divided them."""
        self.begin(optimizer)
        return method(optimizer, *args, **kwargs)

    on_clip_grad_norm_ = on_step
