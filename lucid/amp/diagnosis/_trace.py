"""Trace a skipped step to a module: by a replay where the forward is to blame, else by its gradients.

Knows when a replay is worth its time and whether it reproduced what happened. Refuses to know hooks, and how
a cause is put into words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lucid.amp import _torch
from lucid.amp.diagnosis import _models
from lucid.amp.diagnosis._kept import Forward
from lucid.amp.diagnosis._kinds import Kind
from lucid.amp.diagnosis._replay import Replay, replay
from lucid.amp.diagnosis._rows import Lack, Row, Seen
from lucid.amp.diagnosis._skips import Skip
from lucid.amp.diagnosis._tools import CALLS, Tool
from lucid.amp.diagnosis._trees import tensors_in

__all__ = ["ALL_FINITE", "Grown", "Trace", "Tracer"]

ALL_FINITE = "No loss was found that was not finite."
"""Why no batch was saved, if nothing worse is known."""

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


class Tracer:
    """Traces the skips of one model.

    Args:
        model: the module inside all wrappers.
        replays: whether a forward may be run again.
        save_batch: a file for the first batch that made a loss not finite, or None.
        tool: in whose words the next move is told.

    Attributes:
        unsaved: why no batch was saved; empty where one was, or nobody wanted one.
    """

    def __init__(
        self, model: nn.Module, replays: bool, save_batch: str | os.PathLike[str] | None, tool: Tool = CALLS
    ) -> None:
        self.model, self.tool = model, tool
        self.unsaved = "" if save_batch is None else ALL_FINITE
        self._save_batch = save_batch
        self._refusal = _refusal(model) if replays else Lack(f"{_NOT_RUN}: {tool.no_replay}.", tool.replay)
        self._weights = _models.largest_weights(model)
        self._first: dict[str, float] | None = None
        self._order: list[str] = []
        self._rows: dict[Kind, Row] = {}

    def trace(self, skip: Skip, forwards: list[Forward] | None) -> None:
        """Find the module of a skip, and write what was found into it.

        Args:
            skip: at which weights and gradients still are as they were.
            forwards: those that led to it; None where their inputs were not kept.
        """
        kind, number = skip.verdict()
        row = self._rows.setdefault(kind, Row())
        row.come_to(skip.update)
        if number not in row.now:
            looked = self._noted_again if row.is_quiet() else self._seen
            row.now[number] = looked(skip, forwards, row)
        seen = row.now[number]
        skip.trace, skip.grown = seen.trace, seen.grown
        skip.notes += seen.notes
        skip.move = seen.lack.move if seen.lack is not None else ""
        if kind in (Kind.BACKWARD, Kind.EARLIER) and not self._order:
            self._order = self._forward_order(forwards)
        skip.order = self._order

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

    def _seen(self, skip: Skip, forwards: list[Forward] | None, row: Row) -> Seen:
        """Look into a skip; replay its forwards where they are to blame."""
        grown = self._grown()
        if not _begins_in_forward(skip):
            return Seen(grown=grown)
        missing = None if forwards else self._missing(skip, forwards)
        lack = missing if self._refusal is None else self._refusal
        saved = self._saved(skip, forwards, missing)
        if lack is not None or not forwards:
            return Seen(None, grown, saved if lack is None else tuple(dict.fromkeys((lack.why, *saved))), lack)
        trace = self._replay(forwards)
        return Seen(trace, grown, (*saved, *_doubts(trace, forwards)))

    def _noted_again(self, skip: Skip, forwards: list[Forward] | None, row: Row) -> Seen:
        """One of many in a row: what was seen at an earlier one, without another look."""
        earlier = row.earlier(skip.verdict()[1])
        if not _begins_in_forward(skip):
            return Seen(grown=earlier.grown)
        told = earlier.trace is not None and earlier.trace.replay.error is None
        count = f"{row.updates} updates in a row were skipped for this"
        notes = f"{count}; what is told of modules was seen at an earlier one." if told else f"{count}."
        saved = self._saved(skip, forwards, None) if forwards else ()
        lack = earlier.lack
        return Seen(earlier.trace, earlier.grown, (*saved, notes, *((lack.why,) if lack else ())), lack)

    def _missing(self, skip: Skip, forwards: list[Forward] | None) -> Lack:
        """Why there is nothing to run again, and what to do about it."""
        if forwards is not None:
            return _UNSEEN
        passes = len(skip.passes)
        keep = self.tool.keep.format(passes)
        return Lack(_NOT_KEPT, f"{keep} keeps the inputs of all {passes} backward passes: then the layer is told.")

    def _saved(self, skip: Skip, forwards: list[Forward] | None, missing: Lack | None) -> tuple[str, ...]:
        """Save the first batch that can be had, if somebody wants it; what there is to say about it."""
        if self._save_batch is None:
            return ()
        if missing is not None or not forwards:
            self.unsaved = " ".join(missing or ())
            return (*(missing or ())[:1], "So no batch was saved.")
        path, self._save_batch = self._save_batch, None
        problem = _save(path, skip, forwards)
        self.unsaved = problem or ""
        return (problem or f"The batch was saved to {os.fspath(_models.path_of_rank(path))}.",)

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


_UNSEEN = Lack(
    "No forward of the watched model was seen before this loss: it ran inside torch.compile, or not at all.",
    "Run the model uncompiled to see in which layer it begins.",
)
_NOT_KEPT = "The inputs of that forward were no longer kept."


_NOT_RUN = "The forward was not run again"


def _refusal(model: nn.Module) -> Lack | None:
    """Why a forward of this model cannot be run again, if it cannot."""
    why = _models.replay_refusal(model)
    return None if why is None else Lack(f"{_NOT_RUN}: {why}.", "")


def _begins_in_forward(skip: Skip) -> bool:
    """Whether the forward is to blame, so that running it again tells more."""
    kind = skip.verdict()[0]
    return kind is Kind.LOSS or (kind is Kind.RANK and _models.ranks() == 1)


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


def _save(path: str | os.PathLike[str], skip: Skip, forwards: list[Forward]) -> str | None:
    """Write the batch; what went wrong, if anything did: a disk that is full must not end a training."""
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
    return None
