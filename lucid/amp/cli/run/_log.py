"""What one scaler does, written down; and what gradients a script without a scaler has.

Knows when to ask ``diagnosis`` and which file of the folder gets the answer. Refuses to know how scalers and models
are found, and how a report looks.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lucid.amp import GradScaler, ScaleUpdate, diagnosis
from lucid.amp._journal import Journal
from lucid.amp.cli.run._clipping import Call
from lucid.amp.cli.run._harmless import harmless
from lucid.amp.cli.run._sampler import Sampler
from lucid.amp.cli.run._slips import Slips
from lucid.amp.diagnosis._events import listen
from lucid.amp.diagnosis._explain import explained
from lucid.amp.diagnosis._kinds import Kind
from lucid.amp.diagnosis._models import unwrapped
from lucid.amp.diagnosis._tools import RUN
from lucid.amp.diagnosis._trace import ALL_FINITE, Tracer
from lucid.amp.history import History

if TYPE_CHECKING:
    from lucid.amp.cli.run._observer import Observer

WITHOUT_SKIP = (Kind.HALF.value, Kind.ZERO.value)

TOLD = 50
"""So many causes are written in full; of a longer row only the 64th, the 128th, …"""


@dataclass(frozen=True)
class Options:
    """How closely to look.

    Attributes:
        every: sample the gradients' ranges at one update in so many.
        watch: watch modules, not scalers only.
        replay: run a forward again to find where it stopped being finite.
        save_batch: keep the inputs of the first such forward.
        keep: the inputs of how many backward passes of an update are kept; None leaves it to the watch.
    """

    every: int = 100
    watch: bool = True
    replay: bool = True
    save_batch: bool = False
    keep: int | None = None


class ScalerLog:
    """Writes down what one scaler does.

    Args:
        observer: who asks; takes notes, knows the folder.
        scaler: lucid's or PyTorch's.
        number: from 0, in the order in which the script made them.
    """

    def __init__(self, observer: Observer, scaler: Any, number: int) -> None:
        self.observer, self.options = observer, observer.options
        self.facts = _scaler_facts(scaler)
        self._scaler = weakref.ref(scaler)
        self._told = 0
        self._seen: list[dict[str, Any]] = []
        self._wrong: list[dict[str, Any]] = []
        self._explanation: diagnosis.Explanation | None = None
        folder = observer.folder
        self._batch = folder.file("batch.pt", number) if self.options.save_batch else None
        self._causes = Journal(folder.file("causes.jsonl", number))
        self._sampler = Sampler(self.options.every, folder.file("ranges.json", number), self.note)
        self.history = History(path=folder.file("updates.jsonl", number))
        self._watches: list[weakref.ref[diagnosis.Watch]] = []
        self._unsaved: dict[int, str] = {}
        self._slips = Slips(every_scale_is_heard=not isinstance(scaler, GradScaler))
        self._ears = listen(scaler, self)
        self._steps = register_optimizer_step_post_hook(self._stepped) if self.enabled else None

    @property
    def enabled(self) -> bool:
        """Whether the scaler scales, or did when it was last seen."""
        return bool(self.facts["enabled"])

    def note(self, words: str) -> None:
        """Keep something that the reader of the report must know."""
        self.observer.note(words)

    @harmless
    def scaled(self, scaler: Any, outputs: Any) -> None:
        """A backward is to come."""
        self._slips.on_scaled(outputs)
        if self.observer.folder.rank == 0:
            self._sampler.begin(self.history.next_step)

    @property
    def scaling(self) -> bool:
        """Whether a loss was scaled since the last update."""
        return self._slips.scaled

    @harmless
    def clipped(self, call: Call) -> None:
        """Gradients were clipped, of this scaler or of another."""
        self._slips.on_clipped(call)

    @harmless
    def dividing(self, scaler: Any, optimizer: Any) -> None:
        """Gradients are about to be unscaled."""
        self._slips.on_dividing(optimizer)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._slips.scaled:
            self._look_at(optimizer)

    @harmless
    def _look_at(self, optimizer: Any) -> None:
        self._slips.on_stepped(optimizer)

    @harmless
    def updated(self, scaler: Any, update: ScaleUpdate) -> None:
        """Record an update; where a step was skipped, with its cause. The record comes also where that fails."""
        self._explanation = None
        self._count(update)
        if any(update.skipped):
            self._explain(scaler)
        self._sample(scaler, update)
        told = self._explanation
        self.history.add(update, told.kind if told else None, told.where[:3] if told else ())

    @harmless
    def _count(self, update: ScaleUpdate) -> None:
        self._slips.on_updated(update)

    @harmless
    def _explain(self, scaler: Any) -> None:
        """Ask why; write it in full, the first causes all, then ever fewer of a row that has no end."""
        self._explanation = explained(scaler, RUN)
        self._told += 1
        if self._told <= TOLD or self._told & (self._told - 1) == 0:
            self._causes.append(self.history.next_step, self._explanation.as_dict())
        self._see_whether_saved()

    @harmless
    def _sample(self, scaler: Any, update: ScaleUpdate) -> None:
        sampled = self._sampler.end(self.history.next_step, update.scale, update.overflow)
        if sampled is not None and not update.overflow:
            fate = sampled.fate()
            self.history.sample(zero=fate.zero, subnormal=fate.subnormal)
            self._look(scaler)

    def _look(self, scaler: Any) -> None:
        """Write down what is wrong without a skip, when that has changed; of a scaler that is gone, what was seen."""
        if scaler is not None:
            causes = explained(scaler, RUN).causes
            self._seen = [cause.as_dict() for cause in causes if cause.kind in WITHOUT_SKIP]
        wrong = [*(cause.as_dict() for cause in self._slips.causes()), *self._seen]
        if wrong != self._wrong:
            self._causes.append(self.history.next_step, {"without_skip": True, "causes": wrong})
        self._wrong = wrong

    @harmless
    def watch(self, model: nn.Module | None, name: str) -> None:
        """Let ``diagnosis`` watch a model while this scaler trains it."""
        scaler = self._scaler()
        if model is None or scaler is None or not self.enabled:
            return
        rows = self.options.every if self.observer.folder.rank == 0 else 0
        tracer = Tracer(unwrapped(model), self.options.replay, self._batch, RUN)
        watch = diagnosis.Watch(model, scaler, tracer, None, self.options.keep, rows)
        # Held by the model's hooks: a model that the script lets go takes its watch along.
        self._watches.append(weakref.ref(watch))
        self._sampler.add(name, watch)

    def unsaved(self) -> str:
        """Why no batch was saved; empty where one was."""
        self._see_whether_saved()
        reasons = set(self._unsaved.values())
        if not reasons:
            return "No model was called by the script itself, on its main thread."
        return "" if "" in reasons else next(iter(reasons - {ALL_FINITE}), ALL_FINITE)

    def _see_whether_saved(self) -> None:
        """Ask the watches, before their models are gone."""
        self._unsaved |= {n: watch.tracer.unsaved for n, find in enumerate(self._watches) if (watch := find())}

    @harmless
    def close(self) -> None:
        """Hear no more."""
        if self.enabled:
            self._look(self._scaler())
        self._slips.close()
        for handle in (self._ears, self._steps, *(find() for find in self._watches)):
            if handle is not None:
                handle.remove()
        self.history.close()
        self._causes.close()


class PlainLog:
    """Samples the gradients of a script that scales nothing, step by step of its optimizers."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._sampler = Sampler(observer.options.every, observer.folder.file("ranges.json"), self.note)
        self._every = observer.options.every
        self._steps = 0
        self._hook: Any = None
        self._watches: list[weakref.ref[diagnosis.Watch]] = []

    def note(self, words: str) -> None:
        """Keep something that the reader of the report must know."""
        self.observer.note(words)

    @harmless
    def sample(self, model: nn.Module, name: str) -> None:
        """Sample this model; its first backward is still to come."""
        if self.observer.folder.rank == 0:
            self._hook = self._hook or register_optimizer_step_pre_hook(self._stepping)
            watch = diagnosis.watch(model, None, report=None, replay=False, outputs=self._every)
            self._watches.append(weakref.ref(watch))
            self._sampler.add(name, watch)
            self._sampler.begin(0)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._step()

    @harmless
    def _step(self) -> None:
        self._sampler.end(self._steps, None)
        self._steps += 1
        self._sampler.begin(self._steps)

    @harmless
    def close(self) -> None:
        """Sample no more."""
        for handle in (self._hook, *(find() for find in self._watches)):
            if handle is not None:
                handle.remove()
        self._hook, self._watches = None, []
        self._sampler.drop()


def _scaler_facts(scaler: Any) -> dict[str, Any]:
    kind = type(scaler)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "enabled": scaler.is_enabled(),
        "settings": {name: number for name, number in scaler.state_dict().items() if not name.startswith("_")},
    }
