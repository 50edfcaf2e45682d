"""What a scaler did lately, remembered so that a skip can be explained afterwards.

Knows losses, gradients and skips as they happen, and keeps small tensors on the device instead of reading
them: a step that lands costs no host read. Refuses to know modules and why they fail.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lucid.amp import _causes
from lucid.amp._causes import Counts
from lucid.amp.diagnosis import _models, _ranks
from lucid.amp.diagnosis._events import Handle, Listener, SeenGradient, listen
from lucid.amp.diagnosis._kinds import Kind
from lucid.amp.diagnosis._skips import Pass, Skip
from lucid.amp.diagnosis._taps import local_values
from lucid.amp.diagnosis._trees import tensors_in

if TYPE_CHECKING:
    from lucid.amp.diagnosis._watch import Watch

__all__ = ["Record", "keep_record", "record_of"]

REMEMBERED = 100
"""So many skips are kept."""


_UNHEARD = "No scale() was heard since the last update: it ran inside compiled code, or before the watch began."


class Record(Listener):
    """Listens to one scaler and remembers.

    Attributes:
        skips: the latest skips, oldest first.
        updates: how many updates were heard.
        key: what is trained, the same on all ranks that train it.
        found: what watches that ended had found in their models.
    """

    def __init__(self) -> None:
        self.key = ""
        self.skips: deque[Skip] = deque(maxlen=REMEMBERED)
        self.updates = 0
        self._index = 0
        self.found: list[Any] = []
        self._watches: list[Callable[[], Watch | None]] = []
        self._ears: Callable[[], Handle | None] = _nothing
        self._passes: list[Pass] = []
        self._early: dict[int, Counts] = {}
        self._not_finite = False

    def attend(self, scaler: Any, watch: Watch) -> Handle:
        """Listen to the scaler for a watch, until the handle is removed; once, however many watches there are."""
        # Held by the watches alone: a record that led to its scaler would keep it alive.
        ears = self._ears() or listen(scaler, self)
        self._index = _next_update(scaler, self._index)
        if not self.key:
            self.key = _models.signature(watch.model)
            _ranks.begin(self.key)
        self._ears = weakref.ref(ears)
        reference = weakref.ref(watch)
        self._watches.append(reference)

        def leave() -> None:
            """Stop listening with the last watch."""
            self._watches.remove(reference)
            if not self.watches():
                ears.remove()
                self._ears = _nothing

        return Handle(leave)

    def watches(self) -> list[Watch]:
        """The watches that are there."""
        return [watch for watch in (find() for find in self._watches) if watch is not None]

    def scaled(self, scaler: Any, outputs: Any) -> None:
        """Keep the magnitude of what was scaled, and whether gradients were bad already."""
        if torch.compiler.is_compiling():
            return
        losses = list(tensors_in(outputs))
        # After a step that landed nothing can be bad; the check costs a read of all gradients on the device.
        before = self._sums() if self._passes or self._not_finite else []
        half = any(loss.dtype is torch.float16 for loss in losses)
        self._passes.append(Pass([_magnitude(loss) for loss in losses], before, half))
        for watch in self.watches():
            watch.kept.scaled(len(self._passes) - 1)

    def overflowed(self, scaler: Any, optimizer: Any, gradients: Sequence[SeenGradient]) -> None:
        """Count now: clipping may turn every gradient into NaN before the step."""
        self._early[id(optimizer)] = self._count(gradients)

    def skipped(self, scaler: Any, optimizer: Any, gradients: Sequence[SeenGradient]) -> None:
        """Remember a skip; the counts are launched and not read."""
        counts = self._early.pop(id(optimizer), None) or self._count(gradients)
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        kind = type(optimizer).__name__
        watches = [watch for watch in self.watches() if not owned.isdisjoint(watch.names())]
        skip = Skip(self._index, scaler.get_scale(), kind, owned, counts, list(self._passes), bool(watches))
        if watches and not self._passes:
            skip.notes.append(_UNHEARD)
        self.skips.append(skip)
        for watch in watches:
            watch.on_skip(skip)

    def ended(self, scaler: Any, index: int) -> None:
        """Begin the next iteration."""
        self._not_finite = bool(self.skips) and self.skips[-1].update == self._index
        self._passes = []
        self._early = {}
        ended, self._index = self._index, _next_update(scaler, self._index + 1)
        self.updates += 1
        for watch in self.watches():
            watch.on_ended(ended, self._not_finite)

    def began(self, skip: Skip) -> int | None:
        """The update at which gradients that were never cleared became bad; None where that is not known."""
        if skip.verdict()[0] is not Kind.STALE:
            return None
        wanted = skip.update
        for before in reversed(self.skips):
            if before.update < skip.update and before.parameters & skip.parameters:
                if before.update != wanted - 1:
                    break
                wanted = before.update
                if before.verdict()[0] is not Kind.STALE:
                    break
        return wanted if wanted != skip.update else None

    def between_iterations(self) -> bool:
        """Whether nothing was scaled since the last update, and there was one."""
        return self.updates > 0 and not self._passes

    def latest(self) -> list[Skip]:
        """The skips of the latest iteration that had any."""
        return [skip for skip in self.skips if skip.update == self.skips[-1].update] if self.skips else []

    def _count(self, gradients: Sequence[SeenGradient]) -> Counts:
        """Launch the counts, under the names of the watched models where they have the parameter."""
        names: dict[int, str] = {}
        for watch in self.watches():
            names |= watch.names()
        return _causes.count([each._replace(name=names.get(id(each.parameter), each.name)) for each in gradients])

    def _sums(self) -> list[tuple[list[int], Tensor]]:
        """A number for each gradient of the watched models, finite if the gradient is; nothing is read."""
        sums: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
        for parameter in (one for watch in self.watches() for one in watch.model.parameters()):
            if parameter.grad is not None:
                part = local_values(parameter.grad).sum().float()
                ids, parts = sums.setdefault(part.device, ([], []))
                ids.append(id(parameter))
                parts.append(part)
        return [(ids, torch.stack(parts)) for ids, parts in sums.values()]


def _next_update(scaler: Any, counted: int) -> int:
    """The number of the next update: what lucid's scaler says, what was counted of PyTorch's."""
    last = getattr(scaler, "last_update", None)
    return counted if last is None else last.index + 1


def _magnitude(tensor: Tensor) -> Tensor:
    """The largest magnitude as a zero-dimensional tensor that nobody changes; NaN and inf pass through."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.numel() == 1:
        return tensor.clone()
    return tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())


def _nothing() -> None:
    """Stand in for a reference to what is not there."""


_records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()


def record_of(scaler: Any) -> Record | None:
    """The record of a scaler; None where nobody ever listened for one."""
    return _records.get(scaler)


def keep_record(scaler: Any, record: Record) -> None:
    """Let ``record_of`` find a record for as long as its scaler lives."""
    _records[scaler] = record
