"""A file of JSON lines that survives a kill at any byte.

Knows how to add one line so that it is there whole or can be told from a whole one, how to read what is
there, and how to go on with a file whose last line was torn. Refuses to know what the lines say, but for one
thing: every line begins with the key ``"step"``, by which a file that is no journal is told and left alone.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lucid._warning import warn

__all__ = ["Journal", "read_lines"]

PREFIX = b'{"step":'
CHUNK = 1 << 16
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


class Journal:
    """Adds JSON objects to the end of a file, one a line.

    Each line is handed to the system in one write, so that it is on its way to the disk when ``append``
    returns: what kills the process later does not touch it. (A machine that loses its power may lose the
    last seconds.) A file that ends in half a line is mended first.

    Args:
        path: the file; it and its folder are made where they do not exist, at the first line.

    Raises:
        ValueError: ``path`` holds something else than a journal; it is left as it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._closing: Any = None
        self._writer: int | None = os.getpid()
        if self.path.exists():
            _check_and_mend(self.path)

    def append(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write one line: ``step`` and then ``facts``, inf and NaN as Python's ``json`` spells them.

        A disk that is full must not end a training: it is warned of once, and nothing more is written. A
        child that was forked from the process that opened the journal writes nothing.
        """
        if self._writer != os.getpid():
            return
        line = json.dumps({"step": step, **facts}, separators=(",", ":")).encode() + b"\n"
        try:
            self._write(line)
        except OSError as error:
            self._writer = None
            warn(f"{self.path} cannot be written any more ({error}); the training goes on without it")

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, APPENDING, 0o666)
            self._closing = weakref.finalize(self, os.close, self._file)
        while line:
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Let go of the file. A line added later opens it again."""
        if self._file is not None:
            self._closing()
            self._file = None


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The whole lines of a journal, also while somebody writes it or after its writer was killed.

    Half a line at the end is left out. A line inside the file that cannot be read (a disk that failed) is
    left out with a warning that counts them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no journal.
    """
    content = Path(path).read_bytes()
    _check(Path(path), content[: len(PREFIX)])
    *whole, last = content.split(b"\n")
    lines = [_parsed(line) for line in whole if line]
    unreadable = lines.count(None)
    if unreadable:
        warn(f"{path}: {unreadable} of {len(lines)} lines cannot be read; left out")
    return [line for line in [*lines, _parsed(last)] if line is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line's object, or None for a line that is torn or no object."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def _check(path: Path, head: bytes) -> None:
    """Refuse a file that does not begin as a journal, or as the first bytes of one."""
    if not (head.startswith(PREFIX) or PREFIX.startswith(head)):
        raise ValueError(
            f"{path} is no history: it begins with {head!r}, a history with {PREFIX!r}. "
            "Nothing was changed. Give another path, or move that file away."
        )


def _check_and_mend(path: Path) -> None:
    """Make the file end with a whole line: end a last line that is whole, cut off one that is torn."""
    with path.open("r+b") as file:
        _check(path, file.read(len(PREFIX)))
        size = file.seek(0, os.SEEK_END)
        tail, start = b"", size
        while start and b"\n" not in tail:
            start = max(0, start - CHUNK)
            file.seek(start)
            tail = file.read(size - start)
        last = tail[tail.rfind(b"\n") + 1 :]
        if last and _parsed(last) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        elif last:
            file.truncate(size - len(last))
