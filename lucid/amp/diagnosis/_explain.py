"""Why the last step was skipped: ``explain(scaler)``.

Knows where facts about a scaler are kept, on this rank and on the others, and shows them as text, HTML and
data. Refuses to find anything out itself.
"""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from lucid.amp._causes import NonFinite
from lucid.amp.diagnosis import _models, _ranks
from lucid.amp.diagnosis._kinds import Kind
from lucid.amp.diagnosis._record import Record, record_of
from lucid.amp.diagnosis._skips import Pass, Skip
from lucid.amp.diagnosis._tools import CALLS, Tool
from lucid.amp.diagnosis._words import Cause, cause_of, number

__all__ = ["Explanation", "explain"]

SHOWN = 8
"""So many gradients of a cause are shown as text; the data has all."""

_PRIORITY = (Kind.LOSS, Kind.STALE, Kind.EARLIER, Kind.BACKWARD, Kind.HALF, Kind.ZERO, Kind.RANK, Kind.UNKNOWN)


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. Text by ``str()``, HTML in a notebook, data by :meth:`as_dict`.

    Attributes:
        causes: a cause for each skipped step of the latest update with a skip, on every rank that tells, and for
            whatever else is wrong; those that no scale can help come first. Empty where nothing is wrong.
        update: the number of that update, from 0; None where nothing was skipped or nobody counted.
        scale: the scale that was in force there.
        updates: how many updates were seen; None where nobody counted.
        message: what to know where there is no cause.
    """

    causes: tuple[Cause, ...]
    update: int | None = None
    scale: float | None = None
    updates: int | None = None
    message: str = ""

    @property
    def kind(self) -> str | None:
        """The kind of the first cause."""
        return self.causes[0].kind if self.causes else None

    @property
    def reason(self) -> str | None:
        """The reason of the first cause."""
        return self.causes[0].reason if self.causes else None

    @property
    def where(self) -> tuple[str, ...]:
        """Where the first cause lies: a module, or parameters."""
        return self.causes[0].where if self.causes else ()

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON."""
        return {
            "update": self.update,
            "scale": self.scale,
            "updates": self.updates,
            "message": self.message,
            "causes": [cause.as_dict() for cause in self.causes],
        }

    def __str__(self) -> str:
        lines = [self._head()]
        for cause in self.causes:
            lines.append(f"  {_title(cause)}")
            lines += [f"    {sentence}" for sentence in cause.sentences]
            lines += [f"      {line}" for line in _listed(cause.gradients)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self._head())}</p>"]
        for cause in self.causes:
            sentences = "<br>".join(html.escape(sentence) for sentence in cause.sentences)
            parts.append(f"<p><b>{html.escape(_title(cause))}</b><br>{sentences}</p>{_table(cause.gradients)}")
        return "".join(parts)

    def _head(self) -> str:
        if self.message:
            return self.message
        # Each rank tells of each optimizer.
        ranks = Counter(cause.rank for cause in self.causes if cause.optimizer is not None)
        if not ranks:
            return "No step was skipped, but:"
        skipped = max(ranks.values())
        what = "1 step" if skipped == 1 else f"The steps of {skipped} optimizers were"
        at = f" at update {self.update}" if self.update is not None else ""
        scale = f", scale {number(self.scale)}" if self.scale is not None else ""
        return f"{what} skipped{at}{scale}:"


def explain(scaler: Any) -> Explanation:
    """Why the last skipped step of a scaler was skipped, and what to do.

    What it tells was kept while it happened. lucid's scaler keeps by itself which gradients were not finite and,
    where the losses are still alive at the skip, whether it began in them. Gradients that were never cleared, and the
    module it began in, are known while :func:`watch` watches, as is all that PyTorch's scaler does. Numbers that are
    still on a device are read now.

    Where several processes train together, rank 0 also tells the causes of the other ranks that are watched; it
    waits at most two seconds for them.

    Args:
        scaler: ``lucid.amp.GradScaler``, or one of PyTorch's that was watched.

    Returns:
        An explanation, also where there is nothing to explain: then its ``causes`` are empty and its text says so.

    Raises:
        TypeError: ``scaler`` is no scaler.
    """
    return explained(scaler, CALLS)


def explained(scaler: Any, tool: Tool) -> Explanation:
    """The same, with the next move in a tool's words."""
    lucid = hasattr(type(scaler), "_observe_skip")
    if not lucid and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"explain() takes a gradient scaler, got {type(scaler).__name__}")
    record = record_of(scaler)
    if record is not None:
        return _from_record(record, tool)
    if lucid:
        return _from_lucid(scaler, tool)
    return Explanation((), message=f"{_NOBODY_LISTENED} {tool.watch}")


_NOBODY_LISTENED = (
    "Nothing is known of this scaler: PyTorch's keeps no record of what it does, and nobody was listening."
)


def _from_lucid(scaler: Any, tool: Tool) -> Explanation:
    """What lucid's scaler kept by itself: which gradients were not finite at the last skip."""
    update = scaler.last_update
    latest = update is not None and update.overflow
    skips = [
        Skip(
            0, skip.scale, skip.optimizer, set(), skip.counts, [] if skip.losses is None else [Pass(list(skip.losses))]
        )
        for skip in scaler._skips
    ]
    if not skips:
        return Explanation((), message="No step of this scaler was skipped.")
    causes = tuple(cause_of(skip, None, _models.rank(), tool) for skip in skips)
    return Explanation(causes, update.index if latest else None, update.scale if latest else None)


def _from_record(record: Record, tool: Tool) -> Explanation:
    """What was heard, with whatever else the watch sees in the model."""
    skips = record.latest()
    causes = [cause_of(skip, record.began(skip), _models.rank(), tool) for skip in skips]
    watches = record.watches()
    found = [cause for watch in watches for cause in watch.findings()] if watches else record.found
    update = skips[-1].update if skips else None
    silent: list[int] = []
    if update is not None and _models.ranks() > 1 and _models.rank() == 0:
        told, silent = _ranks.heard(record.key, update)
        causes += [Cause.from_dict(each) for each in told]
    causes = sorted([*causes, *found], key=lambda cause: _PRIORITY.index(Kind(cause.kind)))
    plural = "" if record.updates == 1 else "s"
    message = "" if causes else f"No step was skipped in {record.updates} watched update{plural}."
    if silent:
        causes.append(_unheard(silent, tool))
    return Explanation(tuple(causes), update, skips[-1].scale if skips else None, record.updates, message)


def tell(record: Record, tool: Tool) -> None:
    """Leave this rank's causes of the latest skip for rank 0."""
    causes = [cause_of(skip, record.began(skip), _models.rank(), tool) for skip in record.latest()]
    _ranks.tell(record.key, record.latest()[-1].update, [cause.as_dict() for cause in causes])


def _unheard(ranks: list[int], tool: Tool) -> Cause:
    names = ", ".join(map(str, ranks))
    sentence = f"Nothing was heard from rank {names}: {tool.everywhere}."
    return Cause(Kind.UNKNOWN.value, None, (), (sentence,))


def _title(cause: Cause) -> str:
    rank = f"rank {cause.rank}: " if _models.ranks() > 1 else ""
    where = f" in {', '.join(cause.where[:SHOWN])}" if cause.where else ""
    reason = f" ({cause.reason})" if cause.reason else ""
    optimizer = f"{cause.optimizer}: " if cause.optimizer else ""
    return f"{rank}{optimizer}{cause.kind}{where}{reason}"


def _listed(gradients: tuple[NonFinite, ...]) -> list[str]:
    """The gradients that were not finite, aligned; the first few of many."""
    if not gradients:
        return []
    width = max(len(gradient.name) for gradient in gradients[:SHOWN])
    lines = [
        f"{gradient.name:<{width}}  {gradient.inf:,} inf, {gradient.nan:,} NaN of {_shape(gradient)}, "
        f"largest finite {number(gradient.largest)}"
        for gradient in gradients[:SHOWN]
    ]
    rest = len(gradients) - SHOWN
    return [*lines, f"and {rest} more"] if rest > 0 else lines


def _shape(gradient: NonFinite) -> str:
    return "×".join(map(str, gradient.shape)) or "1"


def _table(gradients: tuple[NonFinite, ...]) -> str:
    if not gradients:
        return ""
    cells = [("gradient", "shape", "inf", "NaN", "largest finite")]
    cells += [(each.name, _shape(each), f"{each.inf:,}", f"{each.nan:,}", number(each.largest)) for each in gradients]
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in cells)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
