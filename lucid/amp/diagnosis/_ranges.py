"""How far gradients reach in float16's range, and which scale suits them: ``ranges(model, scaler)``.

Knows gradients as rows with names. Refuses to know how a magnitude is measured (``_spread``), and how a
report is shown (``_ranges_shown``, ``_ranges_picture``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lucid.amp.diagnosis import _models
from lucid.amp.diagnosis._record import record_of
from lucid.amp.diagnosis._spread import LARGEST, Fate, Measure, Spread
from lucid.amp.diagnosis._taps import TorchTaps, local_values
from lucid.amp.diagnosis._watch import watch_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["HEADROOM", "SHIFTS", "Ranges", "Row", "ranges"]

SHIFTS = tuple(range(-8, 9))
"""What would become of the gradients is told at the current scale times 2 to the power of each of these."""

HEADROOM = 3
"""Bits that a recommended scale leaves below 65504, for batches whose gradients are larger than these."""


@dataclass(frozen=True)
class Row:
    """One gradient.

    Attributes:
        name: of the parameter, or of the module whose output it belongs to.
        what: ``"parameter"`` or ``"output"``.
        shape: of the gradient.
        scale: what it is taken to be multiplied by in ``spread`` and in ``fate``.
        spread: how its scaled magnitudes are spread.
        largest_output: of an output, the largest magnitude of the output itself; else None.
    """

    name: str
    what: str
    shape: tuple[int, ...]
    scale: float
    spread: Spread
    largest_output: float | None = None

    @property
    def largest(self) -> float:
        """The largest finite magnitude of the true gradient."""
        return self.spread.largest / self.scale

    @property
    def median(self) -> float:
        """The median magnitude of the true gradient's elements that are finite and not zero."""
        return self.spread.median / self.scale

    @property
    def not_finite(self) -> int:
        """How many elements are inf or NaN."""
        return self.spread.inf + self.spread.nan

    def fate(self, shift: int = 0) -> Fate:
        """What float16 makes of the gradient at ``scale * 2**shift``, in percent of its elements."""
        return self.spread.fate(shift)

    def flushed(self, shift: int = 0) -> float:
        """Percent of the elements that are not zero which become zero at ``scale * 2**shift``."""
        fate = self.spread.fate(shift)
        return 100.0 * fate.flush / (100.0 - fate.zero) if fate.zero < 100.0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values, fit for JSON."""
        return {
            "name": self.name,
            "what": self.what,
            "shape": list(self.shape),
            "largest": self.largest,
            "median": self.median,
            "inf": self.spread.inf,
            "nan": self.spread.nan,
            "unused_bits": self.spread.unused_bits,
            "largest_output": self.largest_output,
            "now": self.fate()._asdict(),
            "at": {str(shift): self.fate(shift)._asdict() for shift in SHIFTS},
            "log2": {str(exponent): share for exponent, share in self.spread.shares().items()},
        }


@dataclass(frozen=True)
class Ranges:
    """What :func:`ranges` measured. Text by ``str()``, HTML in a notebook, ``table()``, ``plot()``, data.

    Attributes:
        rows: a row a gradient: the parameters in the model's order, then the watched outputs.
        scale: the scaler's scale; None where there is no scaler, and the rows tell of scale 1.
        recommended_scale: the largest power of two that keeps every gradient measured ``HEADROOM`` bits below
            65504; None where all of them are zero or not finite.
        without: names of parameters that had no gradient.
        partial: whether each row tells of this rank's part of the gradient only.
    """

    rows: tuple[Row, ...]
    scale: float | None
    recommended_scale: float | None
    without: tuple[str, ...] = ()
    partial: bool = False

    def fate(self, shift: int = 0) -> Fate:
        """What float16 makes of all parameters' gradients together, in percent of their elements."""
        rows = [row for row in self.rows if row.what == "parameter"]
        elements = sum(row.spread.elements for row in rows)
        fates = [(row.spread.elements / elements, row.fate(shift)) for row in rows if elements]
        return Fate(*(sum(share * fate[part] for share, fate in fates) for part in range(len(Fate._fields))))

    def shift_to(self, scale: float) -> int:
        """How many times the scale of the rows must be doubled to come to ``scale``, rounded down."""
        return math.floor(math.log2(scale / (self.scale or 1.0)))

    def findings(self) -> list[str]:
        """What the numbers say, in sentences: whether float16 suits these gradients, and at which scale."""
        from lucid.amp.diagnosis import _ranges_shown

        return _ranges_shown.findings(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON."""
        return {
            "scale": self.scale,
            "recommended_scale": self.recommended_scale,
            "findings": self.findings(),
            "without_gradient": list(self.without),
            "partial": self.partial,
            "rows": [row.as_dict() for row in self.rows],
        }

    def table(self) -> Table:
        """The rows as a table for ``rich.print``.

        Raises:
            ModuleNotFoundError: rich is missing; the message says what to install.
        """
        from lucid.amp.diagnosis import _ranges_shown

        return _ranges_shown.table(self)

    def plot(self, path: str | os.PathLike[str] | None = None, *, at_most: int = 24) -> Figure:
        """Draw a histogram of log₂|gradient| for each row, with float16's window over it.

        Args:
            path: a file to save it to; the ending says the format.
            at_most: so many rows are drawn: where there are more, the first, the last and those between at even
                distances.

        Returns:
            The figure.

        Raises:
            ModuleNotFoundError: matplotlib is missing; the message says what to install.
        """
        from lucid.amp.diagnosis import _ranges_picture

        return _ranges_picture.plot(self, path, at_most)

    def __str__(self) -> str:
        from lucid.amp.diagnosis import _ranges_shown

        return _ranges_shown.text(self)

    def _repr_html_(self) -> str:
        from lucid.amp.diagnosis import _ranges_shown

        return _ranges_shown.page(self)


def ranges(model: nn.Module, scaler: Any = None, *, unscaled: bool | None = None) -> Ranges:
    """Measure the gradients that a model holds now against float16's range.

    Call it after ``backward`` and before the gradients are cleared. With a scaler it tells what float16 makes of
    them at the scale in force and at 2⁻⁸ … 2⁸ times that. Without one, on a float32 or bfloat16 run, it
    answers: would float16 work here, and at which scale?

    Only what is seen can be told: gradients of parameters, and of the modules' outputs where
    ``watch(model, scaler, outputs=N)`` measures those. A float16 run has flushed its smallest gradients before one
    can look; they are among those that are exactly zero.

    Args:
        model: its parameters' ``.grad`` are measured, on their own device; nothing is changed.
        scaler: lucid's or PyTorch's; None, or one that is disabled, where none was used.
        unscaled: whether the gradients hold their true values already, as they do after ``unscale_`` or ``step``.
            None finds out: from lucid's scaler itself within an iteration, from a scaler that is watched always; where
            nothing tells, gradients are taken to be scaled, as they are after ``backward``.

    Returns:
        A report.

    Raises:
        RuntimeError: no parameter has a gradient.
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ranges() takes a module first, got {type(model).__name__}: ranges(model, scaler)")
    scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
    divided = scale is not None and (_divided(scaler) if unscaled is None else unscaled)
    measures, without, partial = _measured(_models.unwrapped(model), scale if divided and scale else 1.0)
    if not measures:
        raise RuntimeError(
            "ranges() found no gradient: none of the model's parameters has one. "
            "Call it after backward(), before the gradients are cleared."
        )
    rows = [Row(name, "parameter", shape, scale or 1.0, measure.read()) for name, shape, measure in measures]
    watch = watch_of(_models.unwrapped(model))
    for one in watch.outputs.measured() if watch is not None else ():
        # The scale may have moved since that forward; to the nearest bit where not by powers of two.
        spread = one.gradient.read().shifted(round(math.log2((scale or 1.0) / one.scale)))
        rows.append(Row(one.name, "output", one.shape, scale or 1.0, spread, one.largest.item()))
    return Ranges(tuple(rows), scale, _recommended(rows), tuple(without), partial)


def _measured(model: nn.Module, factor: float) -> tuple[list[tuple[str, tuple[int, ...], Measure]], list[str], bool]:
    """A measure of each gradient, the names of what has none, and whether any is spread over ranks."""
    names = _models.names(model)
    measures, without, partial = [], [], False
    for parameter in model.parameters():
        name = names[id(parameter)]
        if parameter.grad is None:
            if parameter.requires_grad:
                without.append(name)
            continue
        partial = partial or hasattr(parameter.grad, "to_local")
        measures.append((name, tuple(parameter.shape), Measure(local_values(parameter.grad), factor)))
    return measures, without, partial


def _divided(scaler: Any) -> bool:
    """Whether the gradients hold their true values, as far as the scaler or a record of it tells."""
    if hasattr(type(scaler), "_observe_skip"):
        record = record_of(scaler)
        return scaler._stages.in_progress() or (record is not None and record.between_iterations())
    return TorchTaps.on(scaler).divided


def _recommended(rows: Iterable[Row]) -> float | None:
    """The largest power of two that leaves the headroom over the largest of all gradients."""
    largest = max((row.largest for row in rows), default=0.0)
    if not largest > 0:
        return None
    return 2.0 ** max(-126, min(127, math.floor(math.log2(LARGEST / largest)) - HEADROOM))
