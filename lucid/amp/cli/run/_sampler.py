"""Samples of the gradients as a backward leaves them: before they are divided, clipped or cleared.

Knows when an iteration is to be sampled, and hooks every parameter for that one iteration. Refuses to know how a
magnitude is measured (``diagnosis``), and never changes a gradient.
"""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lucid.amp.cli.run._harmless import harmless
from lucid.amp.diagnosis._models import names
from lucid.amp.diagnosis._ranges import Ranges, Row, _recommended
from lucid.amp.diagnosis._spread import Measure
from lucid.amp.diagnosis._taps import local_values
from lucid.amp.diagnosis._watch import Watch

TRIES = 8
"""So many iterations with an overflow are sampled in a row; then it waits for its turn again."""


class Sampler:
    """Measures the gradients of some models in one iteration of every N.

    Args:
        every: N.
        path: where the first sample and the latest one are written.
        note: told of a failure, which must not end the script.
    """

    def __init__(self, every: int, path: Path, note: Callable[[str], None]) -> None:
        self._every, self._path, self.note = every, path, note
        self._watches: list[tuple[str, weakref.ref[Watch]]] = []
        self._hooks: list[Any] = []
        self._measures: dict[int, Measure] = {}
        self._first: dict[str, Any] | None = None
        self._owed = 0
        self._process = os.getpid()

    def add(self, name: str, watch: Watch) -> None:
        """Sample the model of this watch too, under this name, and what its modules put out."""
        self._watches.append((name, weakref.ref(watch)))

    def begin(self, iteration: int) -> None:
        """Before a backward: hook the parameters, if this iteration is to be sampled."""
        due = iteration % self._every == 0 or 0 < self._owed <= TRIES
        if self._hooks or not due or self._process != os.getpid():
            return
        for _, find in self._watches:
            watch = find()
            for parameter in watch.model.parameters() if watch is not None else ():
                if parameter.requires_grad and parameter.is_leaf:
                    hook: Callable[[Any], Any] = parameter.register_post_accumulate_grad_hook
                    self._hooks.append(hook(self._measure))

    @harmless
    def _measure(self, parameter: Tensor) -> None:
        """Measure what one parameter has now; a later micro-batch adds to it, and is measured again."""
        if parameter.grad is not None:
            self._measures[id(parameter)] = Measure(local_values(parameter.grad))

    def end(self, iteration: int, scale: float | None, overflow: bool = False) -> Ranges | None:
        """After an iteration: what was measured, written down; None where nothing was.

        Of gradients that are not finite the shares say little: after an overflow the next iteration is sampled
        instead, and such a sample is kept only until there is a better one.
        """
        measures = self._measures
        self.drop()
        if measures:
            self._owed = self._owed + 1 if overflow else 0
        if 0 < self._owed <= TRIES:
            self._measure_outputs_again()
        if not measures or (overflow and self._first is not None):
            return None
        rows: list[Row] = []
        without: list[str] = []
        for name, find in self._watches:
            watch = find()
            if watch is not None:
                prefix = f"{name}." if len(self._watches) > 1 else ""
                rows += _rows(watch.model, prefix, measures, scale or 1.0, without)
                rows += _rows_of_outputs(watch, prefix)
        sampled = Ranges(tuple(rows), scale, _recommended(rows), tuple(without))
        self._write({"step": iteration, **dataclasses.asdict(sampled)}, first=not overflow)
        return sampled

    def _measure_outputs_again(self) -> None:
        for _, find in self._watches:
            watch = find()
            if watch is not None:
                watch.outputs.again()

    def drop(self) -> None:
        """Take the hooks away and forget what was measured."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._measures = [], {}

    def _write(self, sample: dict[str, Any], first: bool) -> None:
        """Keep the first finite sample and this one; there is always a whole file."""
        if first and self._first is None:
            self._first = sample
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps({"first": self._first or sample, "last": sample}), "utf-8")
        os.replace(new, self._path)


def _rows_of_outputs(watch: Watch, prefix: str) -> list[Row]:
    return [
        Row(prefix + one.name, "output", one.shape, one.scale, one.gradient.read(), one.largest.item())
        for one in watch.outputs.measured()
    ]


def _rows(model: nn.Module, prefix: str, measures: dict[int, Measure], scale: float, without: list[str]) -> list[Row]:
    """A row for each parameter that was measured; the names of the others go into ``without``."""
    known, rows = names(model), []
    for parameter in model.parameters():
        name = prefix + known[id(parameter)]
        measure = measures.get(id(parameter))
        if measure is not None:
            rows.append(Row(name, "parameter", tuple(parameter.shape), scale, measure.read()))
        elif parameter.requires_grad:
            without.append(name)
    return rows
