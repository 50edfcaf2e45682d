"""Watch a model train, so that a skipped step can be traced to a module.

Knows when to keep a forward's inputs and when to run it again. A step that lands pays for keeping them: no
copy, no host read, no hook on any module but the outermost. Refuses to know how a replay looks, and how a
cause is put into words.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lucid.amp import _torch
from lucid.amp.diagnosis import _models, _words
from lucid.amp.diagnosis._events import Handle
from lucid.amp.diagnosis._kept import Forward, Kept
from lucid.amp.diagnosis._kinds import Kind
from lucid.amp.diagnosis._outputs import Outputs
from lucid.amp.diagnosis._record import Record, keep_record, record_of
from lucid.amp.diagnosis._replay import fingerprint
from lucid.amp.diagnosis._skips import Skip
from lucid.amp.diagnosis._snapshot import Surroundings
from lucid.amp.diagnosis._trace import Tracer
from lucid.amp.diagnosis._trees import tensors_in, with_tensors
from lucid.amp.diagnosis._words import Cause

if TYPE_CHECKING:
    from lucid.amp.diagnosis._explain import Explanation

__all__ = ["Watch", "watch"]

logger = logging.getLogger("lucid.amp.diagnosis")

SAMPLED = 100
"""Whether gradients are zero throughout is looked at in every so many updates, and in the 1st, 2nd, 4th, 8th …"""


def log(explanation: Explanation) -> None:
    """Write an explanation to the logger ``lucid.amp.diagnosis``: a warning if no lower scale will help."""
    harmless = explanation.kind in (Kind.BACKWARD.value, Kind.EARLIER.value) and explanation.reason is None
    logger.log(logging.INFO if harmless else logging.WARNING, "%s", explanation)


def watch(
    model: nn.Module,
    scaler: Any = None,
    save_batch: str | os.PathLike[str] | None = None,
    *,
    report: Callable[[Explanation], None] | None = log,
    keep: int | None = None,
    replay: bool = True,
    outputs: int = 0,
) -> Watch:
    """Watch ``model`` while ``scaler`` trains it; skipped steps are traced to a module.

    Each forward that wants gradients leaves its inputs (by reference) and the random state behind. When a step
    is skipped and the loss was not finite, that forward is run once more under ``no_grad`` with a look at every
    module; the random state, buffers and attributes are put back. Parameters, gradients and the scale are never
    touched: the run is bit for bit what it is without a watch.

    Args:
        model: the outermost module. ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` are
            looked into.
        scaler: ``lucid.amp.GradScaler`` or one of PyTorch's. None, for a run without one, leaves only what
            ``outputs`` measures.
        save_batch: a file for the first batch that made a loss not finite: ``torch.load`` gives a dict with
            ``args`` and ``kwargs`` of the forward, its ``random_state``, ``update`` and ``scale``.
        report: called with an :class:`Explanation` after each update with a skip, on rank 0; by default it goes to
            the logger ``lucid.amp.diagnosis``. None for silence.
        keep: the inputs of how many backward passes are kept, the latest ones, where several are accumulated. None
            keeps those since the last ``update`` as far as they take 256 MiB beside the latest: the first ones. All
            but the latest are let go of in ``update``.
        replay: False never runs a forward again; then a cause has a kind, and no module in the forward.
        outputs: measure, for :func:`ranges`, the gradients at every module's output in each N-th forward; 0
            for never. A forward that is measured is slower.

    Returns:
        A handle: ``remove()`` ends the watch, as does the end of a ``with`` block. What was seen stays known to
        :func:`explain`.

    Raises:
        TypeError: ``model`` is no module, or ``scaler`` no scaler.
        ValueError: ``keep`` is below 1, or ``outputs`` below 0.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch() takes a module first, got {type(model).__name__}: watch(model, scaler)")
    if (keep is not None and keep < 1) or outputs < 0:
        raise ValueError(f"keep must be at least 1 and outputs at least 0, got keep={keep}, outputs={outputs}")
    tracer = Tracer(_models.unwrapped(model), replay, save_batch)
    return Watch(model, scaler, tracer, report, keep, outputs)


class Watch(Handle):
    """A watch over one model; see :func:`watch`."""

    def __init__(
        self,
        model: nn.Module,
        scaler: Any,
        tracer: Tracer,
        report: Callable[[Explanation], None] | None,
        keep: int | None,
        outputs: int,
    ) -> None:
        self.model, self.tracer, self.report = tracer.model, tracer, report
        self.outputs = Outputs(self.model, outputs, self._scale)
        self._zeros: tuple[int, list[tuple[str, Tensor]]] = (-1, [])
        self._scaler = weakref.ref(scaler) if scaler is not None else _nothing
        self._places: list[torch.device] = []
        self.kept = Kept(keep)
        self.record = (record_of(scaler) if scaler is not None else None) or Record()
        handles: list[Any] = [self.record.attend(scaler, self)] if scaler is not None else []
        handles += [
            model.register_forward_pre_hook(_Ear(self._before), with_kwargs=True),
            model.register_forward_hook(_Ear(self._after)),
        ]
        if scaler is not None:
            keep_record(scaler, self.record)
        _watches[self.model] = weakref.ref(self)

        def undo() -> None:
            """Keep what was found, and let go of everything else."""
            self.record.found = self.findings()
            for handle in handles:
                handle.remove()
            self.kept.clear()
            if watch_of(self.model) is self:
                del _watches[self.model]

        super().__init__(undo)

    def __enter__(self) -> Watch:
        return self

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep what the forward needs to be run again."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        inputs = with_tensors((args, kwargs), _without_graph)
        versions = [_torch.version(tensor) for tensor in tensors_in(inputs)]
        self.kept.open.append(Forward(inputs, Surroundings(self._devices()), versions))
        self.outputs.before()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep a number of the output, to see later whether a replay gives the same."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self.kept.open:
            self.kept.open[-1].print = fingerprint(output)
            self.outputs.after()

    def _devices(self) -> list[torch.device]:
        """Where the model's parameters are; looked up again where the first of them has moved."""
        first = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        if self._places[:1] != [first]:
            self._places = list(dict.fromkeys([first, *(parameter.device for parameter in self.model.parameters())]))
        return self._places

    def on_skip(self, skip: Skip) -> None:
        """Trace a skip while weights, gradients and inputs are still there."""
        try:
            self.tracer.trace(skip, self.kept.of(skip.verdict()[1]))
        except Exception as error:  # a diagnosis ends no training
            skip.notes.append(f"It could not be traced to a module: {type(error).__name__}: {error}.")

    def on_ended(self, update: int, skipped: bool) -> None:
        """Report a skip, on rank 0, once all optimizers had their turn; the other ranks tell it theirs."""
        self.kept.ended()
        self.outputs.updated()
        if skipped:
            first = next(watch for watch in self.record.watches() if watch.report == self.report)
            if first is self:
                self._tell()
            return
        count = self.record.updates
        if count % SAMPLED == 0 or count & (count - 1) == 0:
            self._zeros = (update, _models.zero_gradients(self.model))

    def _tell(self) -> None:
        from lucid.amp.diagnosis import _explain

        scaler = self._scaler()
        if _models.ranks() > 1:
            _explain.tell(self.record, self.tracer.tool)
        if scaler is not None and self.report is not None and _models.rank() == 0:
            self.report(_explain.explain(scaler))

    def findings(self) -> list[Cause]:
        """What is wrong with the model besides skipped steps. Reads what was sampled."""
        parameters = _models.half_parameters(self.model)
        found = [_words.half(parameters, _models.rank())] if parameters else []
        update, zeros = self._zeros
        names = [name for name, zero in zeros if zero.item()]
        skipped_since = bool(self.record.skips) and self.record.skips[-1].update > update
        if names and not skipped_since:
            forwards = self.kept.latest()
            half = any(forward.surroundings.in_float16 for forward in forwards)
            silent = self.tracer.silent(forwards)
            found.append(_words.zero(names, len(zeros), silent, update, half, _models.rank(), self.tracer.tool))
        return found

    def _scale(self) -> float:
        scaler = self._scaler()
        return scaler.get_scale() if scaler is not None else 1.0

    def names(self) -> dict[int, str]:
        """The name of each of the model's parameters, by its id."""
        return _models.names(self.model)


class _Ear:
    """A hook that hears one module only: in a copy or a pickle of the module it does nothing.

    What it becomes there is made of the standard library, so that a saved model is loaded without lucid.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        self._hook(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _without_graph(tensor: Tensor) -> Tensor:
    """The tensor without the graph behind it, which would be kept alive."""
    return tensor.detach() if tensor.grad_fn is not None else tensor


def _nothing() -> None:
    """Stand in for a reference to a scaler where there is none."""


_watches: weakref.WeakKeyDictionary[nn.Module, Callable[[], Watch | None]] = weakref.WeakKeyDictionary()


def watch_of(model: nn.Module) -> Watch | None:
    """The latest watch over a model (the one inside all wrappers) that is still there."""
    return _watches.get(model, _nothing)()
