"""The skips of a run in groups: what they had in common, how often, and how grave it is.

Knows rows of skips. Refuses to find causes; ``diagnosis`` told them while the script ran.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from lucid.amp.cli.report._content import Finding, Weight
from lucid.amp.cli.report._run import ScalerRun
from lucid.amp.cli.report._text import plural, power
from lucid.amp.diagnosis._kinds import Kind
from lucid.amp.diagnosis._ranges_shown import percent
from lucid.amp.diagnosis._tools import RUN
from lucid.amp.history import Record

__all__ = ["BENIGN", "of_skips", "title_of"]

ROW = 25
"""So many skips in a row are no search for a scale any more."""

SETTLED = 20
"""So many updates in a row that land after a skip: the scale has found its place."""

OFTEN = 0.05
"""A scaler whose every twentieth step is skipped costs more than it should."""

BENIGN = (Kind.BACKWARD.value, Kind.EARLIER.value)

TITLES = {
    Kind.LOSS.value: "The loss was not finite",
    Kind.BACKWARD.value: "The backward overflowed",
    Kind.EARLIER.value: "The backward of an accumulated batch overflowed",
    Kind.STALE.value: "Gradients that were not finite were never cleared",
    Kind.RANK.value: "Another rank overflowed",
    Kind.HALF.value: "A parameter is float16",
    Kind.ZERO.value: "Gradients are exactly zero",
    Kind.CLIPPED.value: "Gradients were clipped while they were still scaled",
    Kind.BYPASSED.value: "An optimizer stepped past the scaler",
    Kind.UNSCALED.value: "Gradients were divided by the scale, and no loss was multiplied by it",
}


class Group(NamedTuple):
    """Skips of one kind, one reason and one place."""

    kind: str | None
    records: list[Record]
    cause: dict[str, Any] | None


def of_skips(scaler: ScalerRun, name: str) -> Iterator[Finding]:
    """The search for a scale at the beginning, then a finding for each group, the largest first.

    Args:
        scaler: what one scaler did.
        name: what tells it from the others in a sentence; empty where there is one.
    """
    history = scaler.history
    search = _search_in(history)
    if search:
        yield _search(search, scaler, name)
    groups = _groups(scaler, history[len(search) :])
    for group in sorted(groups, key=lambda group: -len(group.records)):
        yield _finding(group, history, name)


def title_of(kind: str | None, cause: dict[str, Any] | None) -> str:
    """What happened, where, and why, on one line."""
    what = TITLES.get(kind or "", "A step was skipped for a cause that is not known")
    place = f', in "{cause["where"][0]}"' if cause and len(cause["where"]) == 1 else ""
    reason = f": {cause['reason']}" if cause and cause["reason"] else ""
    return f"{what}{place}{reason}"


def _groups(scaler: ScalerRun, records: Sequence[Record]) -> list[Group]:
    told = _told(scaler)
    groups: dict[tuple[str | None, ...], Group] = {}
    for record in records:
        if record.overflow:
            cause = told.get(record.step)
            # Where a scale was too high matters little: the same advice holds everywhere.
            key = (record.kind, *(() if record.kind in BENIGN else record.where[:1]))
            group = groups.setdefault(key, Group(record.kind, [], cause))
            group.records.append(record)
    return list(groups.values())


def _told(scaler: ScalerRun) -> dict[int, dict[str, Any]]:
    """The first cause of each skip that was told in full, by its update."""
    return {
        each["step"]: each["causes"][0] for each in scaler.causes if each["causes"] and not each.get("without_skip")
    }


def _search_in(history: Sequence[Record]) -> Sequence[Record]:
    """The updates until the scale had found its place; none where the first one landed, or where it never did.

    The last of them is the skip that brought the scale down to its place: the lowest, before it was raised from there
    twice. What is skipped later belongs to the training, not to the start.
    """
    lowest, end, raised, seen = math.inf, 0, 0, 0
    for seen, record in enumerate(history, 1):
        if record.overflow and record.kind in BENIGN:
            if record.new_scale < lowest:
                lowest, end, raised = record.new_scale, seen, 0
        elif record.overflow or end == 0:
            break
        elif record.new_scale > record.scale:
            raised += record.scale == lowest
            if raised == 2:
                break
    found = history[:end]
    settled = seen - end > SETTLED or end < ROW
    return found if settled and sum(record.overflow for record in found) < ROW else []


def _search(search: Sequence[Record], scaler: ScalerRun, name: str) -> Finding:
    first, last = search[0], search[-1]
    skipped = plural(sum(record.overflow for record in search), "step")
    # What was skipped because the scale had been raised meanwhile would be skipped from a better start, too.
    saved = sum(1 if record.overflow else -(record.new_scale > record.scale) for record in search)
    cause = _told(scaler).get(first.step)
    found = tuple(cause["sentences"][:-1]) if cause else ()
    when = f" by update {last.step}" if last is not first else ""
    return Finding(
        "fine",
        f"The scale{name} was too high at first: {skipped} skipped",
        (f"It came down from {power(first.scale)} to {power(last.new_scale)}{when}, as it should.", *found),
        f"Nothing; or start where it settled, `init_scale={last.new_scale:g}`, which saves {plural(saved, 'step')}.",
    )


def _finding(group: Group, history: Sequence[Record], name: str) -> Finding:
    kind, records, cause = group
    sentences = tuple(cause["sentences"]) if cause else ()
    places = Counter(record.where[0] for record in records if record.where)
    if len(places) > 1:
        cause, began = None, ", ".join(f'"{place}" {count}×' for place, count in places.most_common(5))
        facts = (*_gist(records, history, name), f"It began in {began}.")
    else:
        facts = (*_gist(records, history, name), *sentences[:-1])
    often = len(records) > max(2, OFTEN * len(history))
    weight: Weight = "fine" if kind in BENIGN else "act"
    if kind in BENIGN and often:
        weight = "act" if _longest_row(records) >= ROW else "look"
    title = f"{title_of(kind, cause)} ({plural(len(records), 'update')})"
    advice = sentences[-1] if sentences else RUN.advice(Kind(kind or Kind.UNKNOWN), None)
    return Finding(weight, title, facts, advice)


def _gist(records: Sequence[Record], history: Sequence[Record], name: str) -> Iterator[str]:
    """When, and how often; and whether anything landed since."""
    first, last, updates = records[0].step, records[-1].step, len(history)
    if len(records) == 1:
        yield f"At update {first} of {updates:,}{name}, at scale {power(records[0].scale)}."
    else:
        share, row = percent(100 * len(records) / updates), _longest_row(records)
        together = f", up to {row} in a row" if row > 2 else ""
        yield f"At {len(records):,} of {updates:,} updates{name} ({share} %), from {first} to {last}{together}."
    lost = len(list(takewhile(lambda record: record.overflow, reversed(history))))
    if lost >= ROW and history[-1] in records:
        yield f"The last {lost:,} updates were all skipped: nothing was learnt since update {updates - lost:,}."


def _longest_row(records: Sequence[Record]) -> int:
    longest = row = 0
    before = None
    for record in records:
        row = row + 1 if before is not None and record.step == before + 1 else 1
        longest, before = max(longest, row), record.step
    return longest
