"""When a falling scale should be spoken of, and in which words.

Knows updates. Refuses to know tensors: the names of what was not finite are asked for only where they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lucid.amp._schedule import ScaleUpdate

ROW = 25
"""Updates skipped in a row before it is said."""

_LOW = (
    "the scale fell below 1, to {scale}. A loss that is summed over a large batch trains well there; otherwise look "
    "for inf or NaN in the data, the loss or the forward pass, which no scale mends."
)
_ROW = (
    "{row} updates in a row were skipped, since update {since}; the scale is now {scale}. Not finite at the last skip: "
    "{names}. If the loss itself is not finite, no scale can help: look at the data, the learning rate and the forward "
    "pass."
)


class Alarm:
    """Says once that the scale fell below 1, and once for each long row of skipped updates."""

    def __init__(self) -> None:
        self._said_low = False
        self._row = 0
        self._next = 0

    def messages(self, update: ScaleUpdate, names: Callable[[], Sequence[str]], given: bool = False) -> list[str]:
        """Return what there is to say after an update.

        Updates without an overflow need not be told: the index shows that there was one.

        Args:
            update: the update that was just made.
            names: returns the parameters whose gradients were not finite at the last skip.
            given: whether the user set the new scale: then it did not fall.
        """
        if not update.overflow:
            return []
        self._row = self._row + 1 if update.index == self._next else 1
        self._next = update.index + 1
        messages = []
        if update.new_scale < 1.0 <= update.scale and not given and not self._said_low:
            self._said_low = True
            messages.append(_LOW.format(scale=update.new_scale))
        if self._row == ROW:
            since = update.index - ROW + 1
            told = _listed(names()) if any(update.skipped) else "unknown (no step was asked for)"
            messages.append(_ROW.format(row=ROW, since=since, scale=update.new_scale, names=told))
        return messages


def _listed(names: Sequence[str], most: int = 5) -> str:
    if not names:
        return "none on this rank"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
