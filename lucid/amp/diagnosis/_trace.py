"""Trace a skipped step to a module: by a replay where the forward is to blame, else by its gradients.

Knows when a replay is worth its time and whether it reproduced what happened. Refuses to know hooks, and how
a cause is put into words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lucid.amp import _torch
from lucid.amp.diagnosis import _models
from lucid.amp.diagnosis._kinds import Kind
from lucid.amp.diagnosis._replay import Replay, replay
from lucid.amp.diagnosis._skips import Skip
from lucid.amp.diagnosis._snapshot import Surroundings
from lucid.amp.diagnosis._trees import tensors_in

__all__ = ["Forward", "Grown", "Tracer"]

GROWN = 100.0
"""Weights that became so many times larger since the watch began have diverged."""


class Grown(NamedTuple):
    """A weight that has grown beyond use: its largest magnitude when the watch began, and now."""

    name: str
    first: float
    now: float


@dataclass
class Trace:
    """What replaying a skip's forwards told.

    Attributes:
        replay: of the forward that was not finite, or of the last one.
        reproduced: whether its output was the same as in the run.
    """

    replay: Replay
    reproduced: bool


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


class Tracer:
    """Traces the skips of one model.

    Args:
        model: the module inside all wrappers.
        replays: whether a forward may be run again.
        save_batch: a file for the first batch that made a loss not finite, or None.
    """

    def __init__(self, model: nn.Module, replays: bool, save_batch: str | os.PathLike[str] | None) -> None:
        self.model = model
        self._save_batch = save_batch
        self._refusal = _models.replay_refusal(model) if replays else "watch() was told replay=False"
        self._weights = _models.largest_weights(model)
        self._first: dict[str, float] | None = None
        self._order: list[str] = []
        self._row: list[Skip] = []

    def trace(self, skip: Skip, forwards: list[Forward] | None) -> None:
        """Find the module of a skip, and write what was found into it.

        Args:
            skip: at which weights and gradients still are as they were.
            forwards: those that led to it; None where their inputs were not kept.
        """
        kind = skip.verdict()[0]
        if self._row and self._row[-1].verdict()[0] is not kind:
            self._row = []
        self._row.append(skip)
        skip.grown = self._row[-2].grown if self._is_quiet() else self._grown()
        if kind is Kind.LOSS or (kind is Kind.RANK and _models.ranks() == 1):
            self._look_into(skip, forwards)
        elif kind in (Kind.BACKWARD, Kind.EARLIER) and not self._order:
            self._order = self._forward_order(forwards)
        skip.order = self._order

    def _is_quiet(self) -> bool:
        """Whether this skip is one of many in a row: only the 1st, 2nd, 4th, 8th … are looked into."""
        row = len(self._row)
        return bool(row & (row - 1))

    def landed(self) -> None:
        """An iteration without a skip ends a row of them."""
        self._row = []

    def silent(self, forwards: list[Forward]) -> list[str]:
        """The modules whose output was zero throughout in a replay of the last forward."""
        if self._refusal is not None or not forwards:
            return []
        return _run(self.model, forwards[-1]).silent

    def _forward_order(self, forwards: list[Forward] | None) -> list[str]:
        """The modules in the order in which a forward runs them; as they were registered where none can be run."""
        if self._refusal is None and forwards:
            order = _run(self.model, forwards[-1]).order
            if order:
                return order
        return list(_models.module_names(self.model).values())

    def _look_into(self, skip: Skip, forwards: list[Forward] | None) -> None:
        """Replay a skip's forwards, unless it is one of many in a row."""
        if self._is_quiet():
            row = len(self._row)
            skip.trace = self._row[-2].trace
            skip.notes.append(f"{row} such skips came in a row; what is told of modules was seen at an earlier one.")
            return
        if forwards and self._save_batch is not None:
            skip.notes.append(_save(self._save_batch, skip, forwards))
            self._save_batch = None
        if self._refusal is not None:
            skip.notes.append(f"The forward was not run again: {self._refusal}.")
        elif not forwards:
            skip.notes.append(_UNSEEN if forwards is not None else _NOT_KEPT)
        else:
            skip.trace = self._replay(forwards)
            skip.notes += _doubts(skip.trace, forwards)

    def _replay(self, forwards: list[Forward]) -> Trace:
        """Run the forwards in turn until one is not finite."""
        reproduced = True
        for forward in forwards:
            seen = _run(self.model, forward)
            reproduced = reproduced and _same([number.item() for number in forward.print], seen.print)
            if seen.origin is not None or seen.error is not None:
                break
        return Trace(seen, reproduced)

    def _grown(self) -> Grown | None:
        """The weight that has grown most since the watch began, if that is beyond use."""
        if self._first is None:
            self._first = _models.read(self._weights)
        now = _models.read(_models.largest_weights(self.model))
        grown = [Grown(name, first, now[name]) for name, first in self._first.items() if first > 0 and name in now]
        worst = max(grown, key=lambda one: one.now / one.first, default=None)
        return worst if worst is not None and worst.now / worst.first >= GROWN else None


def _run(model: nn.Module, forward: Forward) -> Replay:
    return replay(model, forward.inputs, forward.surroundings)


def _same(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two outputs left the same numbers, NaN being the same as NaN."""
    return len(first) == len(second) and all(
        one == other or (math.isnan(one) and math.isnan(other)) for one, other in zip(first, second, strict=True)
    )


_UNSEEN = "No forward of the watched model was seen before this loss: it ran inside torch.compile, or not at all."
_NOT_KEPT = "The inputs of that forward were no longer kept: watch(model, scaler, keep=...) keeps those of more."


def _doubts(trace: Trace, forwards: list[Forward]) -> list[str]:
    """What makes the replay differ from the run, if anything."""
    doubts = []
    if trace.replay.error is not None:
        doubts.append(f"The replay of the forward failed: {trace.replay.error}.")
    elif not trace.reproduced:
        doubts.append("The replay did not reproduce the forward: its output is not the same.")
    changed = any(
        count != _torch.version(tensor)
        for forward in forwards
        for tensor, count in zip(tensors_in(forward.inputs), forward.versions, strict=True)
    )
    if changed:
        doubts.append("The batch was changed in place after the forward; the replay saw the changed one.")
    return doubts


def _save(path: str | os.PathLike[str], skip: Skip, forwards: list[Forward]) -> str:
    """Write the batch, and say so. A disk that is full must not end a training."""
    path = _models.path_of_rank(path)
    forward = forwards[-1]
    batch = {
        "args": forward.inputs[0],
        "kwargs": forward.inputs[1],
        "random_state": forward.surroundings.random_state(),
        "update": skip.update,
        "scale": skip.scale,
    }
    try:
        torch.save(batch, path)
    except Exception as error:
        return f"The batch could not be saved to {os.fspath(path)}: {error}."
    return f"The batch was saved to {os.fspath(path)}."
