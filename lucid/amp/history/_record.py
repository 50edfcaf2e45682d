"""One update of the scale, as a history keeps it and as a logger gets it.

Knows the names under which each fact is written. Refuses to know where records come from and where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Record:
    """One update of the scale.

    Attributes:
        step: number of the update in this history, from 0; goes on where a history is resumed.
        scale: the scale that the losses of this iteration were multiplied by.
        new_scale: the scale after the update.
        overflow: whether a gradient of any optimizer held an inf or a NaN.
        skipped: whether each optimizer's step was skipped, in the order of their first calls.
        kind: the kind of the overflow, as ``diagnosis.explain`` calls it; None where there was none or
            nobody could tell.
        where: the parameters or the module that are to blame, first those that come first; may be empty.
        zero: percent of the sampled gradients' elements that were exactly zero; None where none was sampled.
        subnormal: percent that was below float16's smallest normal number, 2⁻¹⁴, while scaled; or None.
    """

    step: int
    scale: float
    new_scale: float
    overflow: bool = False
    skipped: tuple[bool, ...] = ()
    kind: str | None = None
    where: tuple[str, ...] = ()
    zero: float | None = None
    subnormal: float | None = None

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Record:
        """A record from what :meth:``as_dict`` gave; keys that a later version may have added are left out."""
        known = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        for name in ("skipped", "where"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)

    def as_dict(self) -> dict[str, Any]:
        """What is known of this update, as plain values; what is not known is left out."""
        return {name: fact for name, fact in asdict(self).items() if fact not in (None, ())}


def logger(target: Any) -> Callable[[Record], None]:
    """What hands a record to a SummaryWriter, or to any callable that takes a dict."""
    if hasattr(target, "add_scalar"):

        def add_scalars(record: Record) -> None:
            """Hand each number of the record to the writer."""
            for name, number in _scalars(record).items():
                target.add_scalar(name, number, record.step)

        return add_scalars
    if callable(target):
        return lambda record: target({"amp/step": record.step, **_scalars(record)})
    raise TypeError(
        f"log_to() was given a {type(target).__name__}; it takes a SummaryWriter or a callable that takes a dict"
    )


def _scalars(record: Record) -> dict[str, float]:
    """A record's numbers under the names that loggers get."""
    scalars = {
        "amp/scale": record.scale,
        "amp/overflow": float(record.overflow),
        "amp/skipped": float(sum(record.skipped)),
        "amp/zero_percent": record.zero,
        "amp/subnormal_percent": record.subnormal,
    }
    return {name: number for name, number in scalars.items() if number is not None}
