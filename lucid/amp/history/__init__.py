"""The record of a run: what the scale was at each update, what was skipped and why.

Knows how to collect the updates of a scaler, keep them in bounded memory and in a file that survives a kill,
read them back, hand them to a logger, and draw them. Refuses to know how a cause is found (``diagnosis``
tells it) and never touches a gradient unless it was given a model to sample.

    history = History(scaler, "updates.jsonl")     # lucid's scaler or PyTorch's
    ...                                            # train
    history.plot("scale.png")
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from lucid.amp._journal import Journal, read_lines
from lucid.amp.diagnosis._events import listen
from lucid.amp.diagnosis._explain import explain
from lucid.amp.history._record import Record, logger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lucid.amp._schedule import ScaleUpdate

__all__ = ["History", "Record"]

# Errors, pickles and help pages show the path that a user types.
Record.__module__ = __name__

CAPACITY = 100_000


class History(Sequence[Record]):
    """The updates of one scaler, newest last: a sequence of :class:``Record``.

    Args:
        scaler: lucid's or PyTorch's; None for a history that :meth:``add`` fills.
        path: a file for the records, one JSON object a line. A kill at any byte loses at most the line that
            was being written. A file that exists is gone on with: its records come first, ``step`` continues.
        capacity: how many records are kept in memory, None for all; the file keeps all.

    Raises:
        TypeError: ``scaler`` is none.
        ValueError: ``path`` holds something that is no history, or ``capacity`` is below 1.

    A disabled scaler makes no update, so that its history stays empty. Records are collected until
    :meth:``close``, which is also the end of a ``with`` block.
    """

    def __init__(
        self,
        scaler: Any = None,
        path: str | os.PathLike[str] | None = None,
        capacity: int | None = CAPACITY,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, or None to keep all; got {capacity}")
        self._records: deque[Record] = deque(maxlen=capacity)
        self._loggers: list[Callable[[Record], None]] = []
        self._journal = None if path is None else Journal(path)
        if path is not None and os.path.exists(path):
            self._records.extend(map(Record.from_dict, read_lines(path)))
        self._step = self._records[-1].step + 1 if self._records else 0
        self._sample: dict[str, float] = {}
        self._handle = None if scaler is None else listen(scaler, _Attendance(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str], capacity: int | None = None) -> History:
        """The history in a file, complete also where its writer was killed or is still at work.

        Args:
            path: what was given as ``History(scaler, path)``.
            capacity: keep the newest so many only; None for all.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no history.
        """
        history = cls(capacity=capacity)
        history._records.extend(map(Record.from_dict, read_lines(path)))
        history._step = history._records[-1].step + 1 if history._records else 0
        return history

    @property
    def next_step(self) -> int:
        """The ``step`` that the next record will have."""
        return self._step

    def add(self, update: ScaleUpdate, kind: str | None = None, where: Sequence[str] = ()) -> Record:
        """Append an update, by hand; a history that was given a scaler does it itself.

        Args:
            update: what a scaler's update hook is given.
            kind: the kind of the overflow, where there was one and it is known.
            where: the parameters or modules to blame.
        """
        record = Record(
            step=self._step,
            scale=float(update.scale),
            new_scale=float(update.new_scale),
            overflow=bool(update.overflow),
            skipped=tuple(map(bool, update.skipped)),
            kind=kind,
            where=tuple(where),
            **self._sample,
        )
        self._step, self._sample = self._step + 1, {}
        self._records.append(record)
        if self._journal is not None:
            facts = record.as_dict()
            self._journal.append(facts.pop("step"), facts)
        for log in self._loggers:
            log(record)
        return record

    def sample(self, zero: float, subnormal: float) -> None:
        """Give the next record these percentages of gradient elements, as ``diagnosis.ranges`` has them."""
        self._sample = {"zero": float(zero), "subnormal": float(subnormal)}

    def log_to(self, target: Any) -> None:
        """Hand each record, from now on, to a logger; of a history that was read from a file, all of it.

        Args:
            target: a TensorBoard ``SummaryWriter`` (anything with ``add_scalar(tag, value, step)``), or any
                callable that takes a dict, as ``wandb.log`` and ``logging.info`` do. The names are
                ``amp/scale``, ``amp/overflow`` (0 or 1), ``amp/skipped`` (how many optimizers), and, where they
                were sampled, ``amp/zero_percent`` and ``amp/subnormal_percent``; a callable also gets
                ``amp/step``.

        Raises:
            TypeError: ``target`` is neither.
        """
        log = logger(target)
        if self._handle is None:
            for record in self:
                log(record)
        self._loggers.append(log)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the scale on a log axis, the skips marked by kind, and the sampled percentages below.

        Args:
            path: where to save the picture; its ending chooses the format. None to only return it.

        Returns:
            The matplotlib figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is missing.
        """
        from lucid.amp.history._picture import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def close(self) -> None:
        """Stop collecting and let go of the file. What was collected stays."""
        if self._handle is not None:
            self._handle.remove()
        if self._journal is not None:
            self._journal.close()

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        skips = sum(record.overflow for record in self)
        scale = f", scale {self[-1].new_scale:g}" if self else ""
        return f"History({len(self)} updates, {skips} with an overflow{scale})"


class _Attendance:
    """Listens to a scaler for a history, and asks ``diagnosis`` for the cause of each overflow."""

    def __init__(self, history: History) -> None:
        self.history = history

    def updated(self, scaler: Any, update: ScaleUpdate) -> None:
        """Record an update; a step that was skipped, with its cause."""
        if any(update.skipped):
            explanation = explain(scaler)
            self.history.add(update, explanation.kind, explanation.where)
        else:
            self.history.add(update)
