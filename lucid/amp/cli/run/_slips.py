"""Slips in how a script calls its scaler that nothing else shows: no step is skipped, and nothing is learnt.

Knows the order in which losses are scaled and gradients clipped, divided and used. Refuses to guess: it tells only
what it has seen with the very gradients that were divided afterwards.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lucid.amp import ScaleUpdate
from lucid.amp._meshes import parameters_of
from lucid.amp.cli.run._bypass import Suspect
from lucid.amp.cli.run._clipping import BOUNDS, Call
from lucid.amp.diagnosis._kinds import ADVICE, Kind
from lucid.amp.diagnosis._taps import local_values
from lucid.amp.diagnosis._words import Cause, number

SUSPECTS = 4
"""So many optimizers of a script are looked at that step by themselves."""

AT_MOST = 64
"""So many calls of an iteration are remembered."""

ENOUGH = 3
"""So many updates without a scaled loss are no accident."""

NEARLY = 1 - 2**-7
"""A gradient that was cut at a bound lies this near to it, in bfloat16 too."""


class Clipped(NamedTuple):
    """A call that clipped gradients while they were scaled; which ones, held weakly, by their parameters' ids."""

    call: Call
    gradients: dict[int, weakref.ref[Tensor]]


class Slips:
    """What one scaler's script does in the wrong order.

    Args:
        every_scale_is_heard: False where a ``scale`` inside compiled code is heard only while that is traced.

    Attributes:
        scaled: whether a loss was scaled since the last update.
    """

    def __init__(self, every_scale_is_heard: bool) -> None:
        self.scaled = False
        self._may_be_scaled = False
        self._every_scale_is_heard = every_scale_is_heard
        self._calls: deque[Clipped] = deque(maxlen=AT_MOST)
        self._divided: list[Any] = []
        self._found: list[tuple[Call, Tensor]] = []
        self._clips: dict[str, tuple[int, float]] = {}
        self._cleared: list[Callable[[], Any]] = []
        self._suspects: list[Suspect] = []
        self._unscaled = 0
        self._updates = 0
        self._scale = 1.0

    def on_scaled(self, outputs: Any) -> None:
        """A loss was scaled, and is run backward next."""
        for suspect in () if torch.compiler.is_compiling() else self._suspects:
            suspect.on_scaled(outputs)
        self.scaled = True
        self._may_be_scaled = not self._every_scale_is_heard

    def on_clipped(self, call: Call) -> None:
        """Remember which gradients were clipped that are still scaled, if any of this scaler's are."""
        if not self.scaled or not math.isfinite(call.bound):
            return
        divided = {id(parameter) for optimizer in self._divided for parameter in parameters_of(optimizer)}
        gradients = {
            id(parameter): weakref.ref(parameter.grad)
            for parameter in call.parameters
            if parameter.grad is not None and id(parameter) not in divided
        }
        if gradients:
            self._calls.append(Clipped(call, gradients))

    def on_dividing(self, optimizer: Any) -> None:
        """What was clipped until now, and is divided by the scale only now, was clipped too early."""
        self._divided.append(optimizer)
        if self._suspects:
            mine = set(map(id, parameters_of(optimizer)))
            # Its step was a wrapper's, or it does both.
            self._drop([one for one in self._suspects if not mine.isdisjoint(map(id, parameters_of(one.find())))])
        for call, clipped in self._calls:
            gradients = [
                parameter.grad
                for parameter in parameters_of(optimizer)
                if id(parameter) in clipped and clipped[id(parameter)]() is parameter.grad is not None
            ]
            if gradients:
                self._found.append((call, _was_bound(call, gradients)))

    def on_stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, by its scaler or not."""
        cleared = any(each is optimizer for each in (*self._divided, *(find() for find in self._cleared)))
        if cleared or not self.scaled:
            return
        suspect = next((one for one in self._suspects if one.find() is optimizer), None)
        if suspect is None and len(self._suspects) < SUSPECTS and getattr(optimizer, "grad_scale", None) is None:
            suspect = Suspect(optimizer)
            self._suspects.append(suspect)
        if suspect is not None:
            suspect.on_stepped()

    def _drop(self, suspects: list[Suspect]) -> None:
        for suspect in suspects:
            suspect.forget()
            self._suspects.remove(suspect)
            self._cleared.append(suspect.find)

    def close(self) -> None:
        """Look no more."""
        for suspect in self._suspects:
            suspect.forget()

    def on_updated(self, update: ScaleUpdate) -> None:
        """Count, and begin the next iteration."""
        self._updates += 1
        self._scale = update.scale
        if update.scale != 1.0 and not update.overflow:
            self._unscaled += bool(self._divided) and not (self.scaled or self._may_be_scaled)
            calls = {call.name: call for call, was_bound in self._found if was_bound.item()}
            for name, call in calls.items():
                times, _ = self._clips.get(name, (0, 0.0))
                self._clips[name] = times + 1, call.bound
        for suspect in self._suspects:
            suspect.forget()
        self.scaled, self._divided, self._found = False, [], []
        self._calls.clear()

    def causes(self) -> Iterator[Cause]:
        """What was found so far."""
        for name, (times, bound) in self._clips.items():
            of = "each true element" if name == "clip_grad_value_" else "the true norm"
            yield Cause(
                Kind.CLIPPED.value,
                f"{name}({BOUNDS[name]}={bound:g})",
                (),
                (
                    f"At {times:,} of {self._updates:,} updates `{name}` clipped gradients that were still multiplied "
                    f"by the scale, {number(self._scale)} at last: its bound of {bound:g} was one of "
                    f"{bound / self._scale:.2g} on {of}.",
                    ADVICE[Kind.CLIPPED],
                ),
            )
        for suspect in self._suspects:
            if suspect.shown:
                yield Cause(
                    Kind.BYPASSED.value,
                    f"{suspect.name}.step()",
                    (),
                    (
                        f"`{suspect.name}.step()` was called {suspect.times:,} times by itself, after the backward of "
                        "a scaled loss: it took gradients that were still multiplied by the scale, and would take "
                        "infinite ones.",
                        ADVICE[Kind.BYPASSED],
                    ),
                )
        if self._unscaled >= ENOUGH and not self._may_be_scaled:
            yield Cause(
                Kind.UNSCALED.value,
                None,
                (),
                (
                    f"At {self._unscaled:,} of {self._updates:,} updates gradients were divided by the scale, "
                    f"{number(self._scale)} at last, and `scaler.scale` had not been called since the update before. "
                    "Unless the loss was multiplied by hand, they came out that many times too small.",
                    ADVICE[Kind.UNSCALED],
                ),
            )


@torch.no_grad()
def _was_bound(call: Call, gradients: list[Tensor]) -> Tensor:
    """Whether a call made gradients smaller, as a flag that is not read; of those on this rank."""
    if call.norm is not None:
        norm = local_values(call.norm)
        return norm.isfinite() & (norm > call.bound)
    values = [local for local in map(local_values, gradients) if local.numel()]
    largest = [local.abs().amax().float().to(values[0].device) for local in values]
    return torch.stack(largest).amax() >= call.bound * NEARLY if largest else torch.zeros((), dtype=torch.bool)
