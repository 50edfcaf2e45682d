"""What a report consists of, without a form: text, numbers with the order they sort in, pictures.

Knows no HTML, no terminal and no scaler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Weight = Literal["act", "look", "fine"]


class Tile(NamedTuple):
    """One number that is read at a glance."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """Something that was found, and the next thing to do about it.

    Attributes:
        weight: "act" where the training suffers, "look" where it may, "fine" where nothing need be done.
        title: one line.
        facts: the evidence, a sentence or two each; `` `code` `` is shown as code.
        advice: what to do; empty where there is nothing to do.
    """

    weight: Weight
    title: str
    facts: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG with the words that stand for it; ``narrow`` is its form for a phone."""

    png: bytes
    alt: str
    caption: str = ""
    narrow: bytes | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table: text or numbers, a share being drawn as a bar out of 100."""

    title: str
    meaning: str = ""
    is_text: bool = False
    is_share: bool = False


class Cell(NamedTuple):
    """What a cell shows, and the number by which it sorts; None sorts behind every number."""

    words: str
    key: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows under columns, as wide as there are columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    filter_by: str = "Show only names with"


@dataclass(frozen=True)
class Section:
    """A part of the page; ``key`` is its address in it."""

    key: str
    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None
    words: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Content:
    """All of a report, in the order of reading."""

    title: str
    subtitle: str
    verdict: str
    tiles: tuple[Tile, ...] = ()
    findings: tuple[Finding, ...] = ()
    sections: tuple[Section, ...] = ()
    footer: str = ""
    pictures: dict[str, bytes] = field(default_factory=dict)
