"""A folder that ``lucid-amp run`` left, read back.

Knows the files and how the ranks' and scalers' parts belong together. Reads what is there: a run that was
killed, or is still going on, is read as far as it came. Refuses to judge any of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lucid.amp._journal import read_lines
from lucid.amp.cli import Refusal
from lucid.amp.diagnosis._ranges import Ranges, Row
from lucid.amp.diagnosis._spread import Spread
from lucid.amp.history import History


@dataclass(frozen=True)
class ScalerRun:
    """What one scaler did.

    Attributes:
        number: from 0, in the order in which the script made them.
        facts: its class, whether it is enabled, its settings; empty where they were not written.
        history: every update.
        causes: explanations as plain values, each with the ``step`` of its update in the history; those with
            ``without_skip`` tell what was wrong though nothing was skipped, the last one of them at the end.
    """

    number: int
    facts: dict[str, Any]
    history: History
    causes: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Sample:
    """The gradients of one iteration: the scaler's number, the update, and their ranges."""

    number: int
    step: int
    ranges: Ranges


@dataclass(frozen=True)
class Run:
    """A whole run.

    Attributes:
        path: its folder.
        facts: ``run.json``.
        scalers: one entry a scaler, empty where the script made none that was used.
        samples: the latest sample of the gradients for each scaler, or the one of a script without a scaler.
        others: ``run.json`` of the other ranks.
    """

    path: Path
    facts: dict[str, Any]
    scalers: tuple[ScalerRun, ...]
    samples: tuple[Sample, ...] = ()
    others: tuple[dict[str, Any], ...] = field(default=())

    @property
    def updates(self) -> int:
        """How many updates all scalers made."""
        return sum(len(scaler.history) for scaler in self.scalers)

    @property
    def enabled(self) -> tuple[dict[str, Any], ...]:
        """The facts of the scalers that scale."""
        return tuple(facts for facts in self.facts.get("scalers", ()) if facts["enabled"])


def read(path: Path) -> Run:
    """Read a folder.

    Raises:
        Refusal: there is no run in it.
    """
    if not (path / "run.json").is_file():
        raise Refusal(f"there is no run in {str(path)!r}: no run.json; give the folder that lucid-amp run named")
    facts = _json(path / "run.json")
    known = facts.get("scalers", [])
    scalers = []
    for number, its in enumerate(known):
        more = f"-{number + 1}" if number else ""
        place, causes = path / f"updates{more}.jsonl", tuple(_lines(path / f"causes{more}.jsonl"))
        # A script that fails at its first step leaves causes and no update.
        if place.exists() or causes:
            history = History.read(place) if place.exists() else History()
            scalers.append(ScalerRun(number, its, history, causes))
    others = tuple(_json(place) for place in sorted(path.glob("run.rank*.json")))
    samples = [_sample(path, number) for number in range(max(1, len(known)))]
    return Run(path, facts, tuple(scalers), tuple(filter(None, samples)), others)


def _sample(path: Path, number: int) -> Sample | None:
    """The latest sample of a scaler's gradients, None where there is none."""
    more = f"-{number + 1}" if number else ""
    place = path / f"ranges{more}.json"
    if not place.exists():
        return None
    facts = _json(place)["last"]
    step, rows = facts.pop("step"), tuple(_row(row) for row in facts.pop("rows"))
    return Sample(number, step, Ranges(rows, **{**facts, "without": tuple(facts["without"])}))


def _row(facts: dict[str, Any]) -> Row:
    """A row from its plain values, after a way through JSON, where every key is text and every tuple a list."""
    spread = facts["spread"]
    bins = {int(exponent): tuple(kinds) for exponent, kinds in spread["bins"].items()}
    return Row(**{**facts, "shape": tuple(facts["shape"]), "spread": Spread(**{**spread, "bins": bins})})


def _json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise Refusal(f"{path} cannot be read: {error}") from None
    if not isinstance(facts, dict):
        raise Refusal(f"{path} holds no run: {type(facts).__name__} instead of an object")
    return facts


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.exists() else []
