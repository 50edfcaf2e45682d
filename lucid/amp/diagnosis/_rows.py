"""Updates in a row that were skipped alike, and what was seen in them.

Knows which of a long row are worth another look. Refuses to know how one looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lucid.amp.diagnosis._trace import Grown, Trace

__all__ = ["Lack", "Row", "Seen"]


class Lack(NamedTuple):
    """Why something could not be seen, and the move that shows it; each a sentence, the move perhaps empty."""

    why: str
    move: str


class Seen(NamedTuple):
    """What was found out about a skip, for others of the same backward and for those that follow in a row.

    Attributes:
        trace: as in the skip.
        grown: as in the skip.
        notes: what was noted of it.
        lack: why there is no trace, where there should be one.
    """

    trace: Trace | None = None
    grown: Grown | None = None
    notes: tuple[str, ...] = ()
    lack: Lack | None = None


class Row:
    """Updates in a row that were skipped for one kind of cause, by however many optimizers.

    Attributes:
        updates: how many.
        now: what was seen in the latest of them, by the number of the backward pass.
        before: what was seen in the one before.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.now: dict[int, Seen] = {}
        self.before: dict[int, Seen] = {}
        self._update = -1

    def come_to(self, update: int) -> None:
        """Count an update, if it is a further one; begin anew if one between them was not skipped."""
        if update == self._update:
            return
        follows = self.updates > 0 and update == self._update + 1
        self.updates = self.updates + 1 if follows else 1
        self.before, self.now, self._update = self.now, {}, update

    def is_quiet(self) -> bool:
        """Whether this update is one of many: only the 1st, 2nd, 4th, 8th … are looked into."""
        return bool(self.updates & (self.updates - 1))

    def earlier(self, number: int) -> Seen:
        """What was seen of such a skip in the update before, if possible of the same backward pass."""
        return self.before.get(number) or next(iter(self.before.values()))
