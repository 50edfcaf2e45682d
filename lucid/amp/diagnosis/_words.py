"""A skip in words: what was found, how it is known, what to do next.

Knows sentences and numbers for people. Refuses to know where the facts come from, and how a page shows them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lucid.amp._causes import NonFinite
from lucid.amp.diagnosis._extents import Extent
from lucid.amp.diagnosis._kinds import ADVICE, Kind, Reason
from lucid.amp.diagnosis._replay import Origin
from lucid.amp.diagnosis._skips import Skip
from lucid.amp.diagnosis._spread import LARGEST
from lucid.amp.diagnosis._tools import CALLS, Tool
from lucid.amp.diagnosis._trace import Trace

__all__ = ["Cause", "cause_of", "few", "half", "module_of", "number", "reason_of", "zero"]


@dataclass(frozen=True)
class Cause:
    """Why one optimizer's step was skipped, or what else is wrong.

    Attributes:
        kind: in a few words, one of a small set; ``"loss not finite"`` for one.
        reason: why that came about, in a few words, as far as a replay could tell; else None.
        where: the module it began in, or else the parameters whose gradients were not finite.
        sentences: what was found, then what to do.
        gradients: those that were not finite, in the optimizer's order.
        optimizer: the name of the optimizer's class; None where it is not about one.
        rank: of the process that found it.
    """

    kind: str
    reason: str | None
    where: tuple[str, ...]
    sentences: tuple[str, ...]
    gradients: tuple[NonFinite, ...] = ()
    optimizer: str | None = None
    rank: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The attributes as plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Cause:
        """A cause from what :meth:`as_dict` gave, also after a way through JSON."""
        gradients = tuple(NonFinite(**{**each, "shape": tuple(each["shape"])}) for each in facts["gradients"])
        return cls(
            **{**facts, "where": tuple(facts["where"]), "sentences": tuple(facts["sentences"]), "gradients": gradients}
        )


def cause_of(skip: Skip, since: int | None, rank: int, tool: Tool = CALLS) -> Cause:
    """The cause of a skip.

    Args:
        skip: what is known of it; read now where it was not read yet.
        since: the update whose gradients were left over, where the kind is ``STALE``.
        rank: of this process.
        tool: in whose words the next move is told.
    """
    kind, _ = skip.verdict()
    reason = reason_of(skip)
    unwatched = kind is Kind.LOSS and not skip.watched
    move = tool.watch if unwatched else skip.move
    found = [*_found(skip, since), *_grew(skip), *skip.notes, *([_UNWATCHED] if unwatched else [])]
    sentences = [*found, " ".join(filter(None, (tool.advice(kind, reason), move if reason is None else "")))]
    where = _where(skip, kind, reason)
    return Cause(
        kind.value, reason.value if reason else None, where, tuple(sentences), skip.gradients(), skip.optimizer, rank
    )


_UNWATCHED = "Which layer it was is not known, for no model with these parameters was watched."


def reason_of(skip: Skip) -> Reason | None:
    """Why it came about; None where nothing tells."""
    kind, grown = skip.verdict()[0], skip.grown is not None
    if kind in (Kind.BACKWARD, Kind.EARLIER):
        return Reason.DIVERGED if grown else None
    if skip.trace is None or skip.trace.replay.error is not None:
        return None
    seen, origin = skip.trace.replay, skip.trace.replay.origin
    if seen.batch.broken:
        return Reason.BATCH
    if origin is None:
        return Reason.FUNCTION if skip.trace.reproduced else None
    if not origin.weight.finite:
        return Reason.WEIGHTS
    if grown:
        return Reason.DIVERGED
    return _reason_in_float32(origin.in_float32)


def _reason_in_float32(largest: float | None) -> Reason | None:
    if largest is None:
        return None
    if not math.isfinite(largest):
        return Reason.FORMULA
    return Reason.RANGE if largest > LARGEST else Reason.PRECISION


def module_of(parameter: str) -> str:
    """The name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def number(value: float) -> str:
    """A number for people: three digits, or a word."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _where(skip: Skip, kind: Kind, reason: Reason | None) -> tuple[str, ...]:
    if kind is Kind.LOSS:
        origin = skip.trace.replay.origin if skip.trace is not None else None
        if origin is not None:
            return (_place(origin.module),)
        return ("the loss function",) if reason is Reason.FUNCTION else ()
    last = _last_module(skip)
    return (_place(last),) if last is not None else tuple(gradient.name for gradient in skip.gradients())


def _place(module: str) -> str:
    return module or "the model itself"


def _last_module(skip: Skip) -> str | None:
    """The last module in forward order whose own gradients were not finite; None where no order is known."""
    blamed = {module_of(gradient.name) for gradient in skip.gradients()}
    return next((name for name in reversed(skip.order) if name in blamed), None)


def _found(skip: Skip, since: int | None) -> list[str]:
    kind, place = skip.verdict()
    which = f" of backward {place + 1} of {len(skip.passes)} since the last update" if len(skip.passes) > 1 else ""
    if kind is Kind.LOSS:
        return [f"The loss{which} was {number(skip.passes[place].loss())} before it was scaled.", *_traced(skip.trace)]
    if kind is Kind.STALE:
        left = f": left over from update {since}" if since is not None else ""
        return [f"Gradients were not finite already before this iteration's first backward{left}."]
    if kind is Kind.RANK:
        return ["Loss and gradients are finite on this rank.", *_traced(skip.trace)]
    if kind is Kind.UNKNOWN:
        return ["A gradient was not finite."]
    loss = skip.passes[place].loss()
    found = [f"The loss{which} was finite ({number(loss)}); the backward overflowed at scale {number(skip.scale)}."]
    if skip.passes[place].half and max(loss, 1.0) * skip.scale > LARGEST:
        found.append(_HALF_LOSS)
    began = _last_module(skip)
    if began is not None:
        found.append(f"It began in {_quoted(began)}, the last module in forward order whose gradients are not finite.")
    return found


_HALF_LOSS = (
    "The loss was float16: multiplied by the scale it, or its gradient, is beyond 65504. "
    "Compute the loss in float32, from out.float()."
)


def _quoted(module: str) -> str:
    return f'"{module}"' if module else "the model itself"


def _grew(skip: Skip) -> list[str]:
    if skip.grown is None:
        return []
    name, first, now = skip.grown
    return [f'The weight "{name}" has grown from {number(first)} to {number(now)} since the watch began.']


def _traced(trace: Trace | None) -> list[str]:
    """What a replay saw."""
    if trace is None:
        return []
    seen, told = trace.replay, []
    if not seen.batch.finite:
        told.append(f"The batch that went into the model held {_bad(seen.batch)}.")
    if seen.origin is not None:
        told += _began(seen.origin)
    elif seen.error is None:
        told.append("In a replay of the forward every module's output was finite.")
    return told


def _began(origin: Origin) -> list[str]:
    place = f'"{origin.module}" ({origin.type})' if origin.module else f"the model itself ({origin.type})"
    weight = f"weight {number(origin.weight.largest)}, " if origin.weight.elements else ""
    if origin.before is not None:
        return [
            f'It began in the code of {place} itself, before it called "{origin.before}", '
            f"whose input held {_bad(origin.inputs)}."
        ]
    largest = f"largest input {number(origin.inputs.largest)}, " if origin.inputs.elements else ""
    output = origin.output or Extent()
    told = [
        f"The first module whose output was not finite is {place}: {largest}{weight}"
        f"finite output {number(output.largest)} (float16 ends at 65504), and {_bad(output)}."
    ]
    if origin.in_float32 is not None:
        true = origin.in_float32
        beyond = f", {true / LARGEST:.3g} times 65504" if math.isfinite(true) and true > LARGEST else ""
        told.append(f"Computed in float32, its largest output is {number(true)}{beyond}.")
    return told


def _bad(extent: Extent) -> str:
    return f"{extent.inf:,} inf and {extent.nan:,} NaN among {extent.elements:,} values"


def half(parameters: list[str], rank: int) -> Cause:
    """The cause of a refusal: parameters that are trained in float16."""
    modules = tuple(map(_place, dict.fromkeys(map(module_of, parameters))))
    found = f"Trained in float16: {few(parameters)}. A scaler's step refuses their gradients."
    return Cause(Kind.HALF.value, None, modules, (found, ADVICE[Kind.HALF]), rank=rank)


def zero(
    parameters: list[str], of: int, silent: list[str], update: int, half_precision: bool, rank: int, tool: Tool = CALLS
) -> Cause:
    """Parameters whose gradients were exactly zero throughout.

    Args:
        parameters: their names.
        of: how many parameters had a gradient.
        silent: the modules that put out nothing but zeros.
        update: when that was seen.
        half_precision: whether the forward ran under float16.
        rank: of this process.
        tool: in whose words the next move is told.
    """
    reason = Reason.DEAD if silent else Reason.FLUSHED if half_precision else None
    found = [f"At update {update} these gradients were exactly zero, {len(parameters)} of {of}: {few(parameters)}."]
    if silent:
        found.append(f"Nothing but zeros comes out of {few(silent)}.")
    modules = map(_place, silent[:1] or dict.fromkeys(map(module_of, parameters)))
    found.append(tool.advice(Kind.ZERO, reason))
    return Cause(Kind.ZERO.value, reason.value if reason else None, tuple(modules), tuple(found), rank=rank)


def few(names: list[str], at_most: int = 5) -> str:
    """The first few names in quotes, and how many more there are."""
    rest = len(names) - at_most
    listed = ", ".join(map(_quoted, names[:at_most]))
    return f"{listed} and {rest} more" if rest > 0 else listed
