"""A report out of a run: which sections there are, what they show, in which order.

Knows a run and what its numbers are called. Refuses to know HTML; judges nothing (``_findings`` does).
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterator
from typing import Any

from lucid.amp.cli.report._content import Cell, Column, Content, Finding, Picture, Section, Table, Tile
from lucid.amp.cli.report._findings import findings
from lucid.amp.cli.report._layers import section_of
from lucid.amp.cli.report._run import Run, ScalerRun
from lucid.amp.cli.report._text import png_of, power, span
from lucid.amp.diagnosis._ranges_shown import TINY, percent

SHOWN = 500
"""So many skips are listed, the first ones."""


def content_of(run: Run) -> Content:
    """Everything that the report of a run shows."""
    found = findings(run)
    moved = [scaler for scaler in run.scalers if scaler.history]
    sections = [section for scaler in moved for section in _of_scaler(scaler, len(run.scalers))]
    for sample in run.samples:
        key, which = _told_apart(sample.number, len(run.samples))
        sections.append(section_of(sample.ranges, sample.step, key, which))
    return Content(
        title=run.facts.get("name", run.path.name),
        subtitle=_subtitle(run),
        verdict=_verdict(run, found),
        tiles=tuple(_tiles(run)),
        findings=found,
        sections=(*sections, _about(run)),
        pictures={f"{section.key}.png": section.pictures[0].png for section in sections if section.pictures},
        footer=f"Made by lucid-amp {run.facts.get('lucid', '')}. lucid-amp report FOLDER draws it again.",
    )


def _subtitle(run: Run) -> str:
    facts = run.facts
    parts = [shlex.join(["lucid-amp", "run", *facts.get("command", [])])]
    if facts.get("started"):
        parts.append(f"{datetime.datetime.fromtimestamp(facts['started']):%d %B %Y, %H:%M}")
    if facts.get("started") and facts.get("ended"):
        parts.append(span(facts["ended"] - facts["started"]))
    if facts.get("world", 1) > 1:
        parts.append(f"{facts['world']} ranks")
    return " · ".join([*parts, f"torch {facts.get('torch', '?')}", str(facts.get("device", ""))])


def _verdict(run: Run, found: tuple[Finding, ...]) -> str:
    """One or two sentences: how much was lost, and whether something is to be done."""
    skips = sum(record.overflow for scaler in run.scalers for record in scaler.history)
    urgent = [finding for finding in found if finding.weight != "fine"]
    if not run.updates:
        return f"{found[0].title}." if found else "Nothing was recorded."
    were = "was" if skips == 1 else "were"
    lost = f"{skips:,} of {run.updates:,} updates {were} skipped." if skips else f"All {run.updates:,} updates landed."
    return f"{lost} {urgent[0].title}." if urgent else f"{lost} Nothing need be changed."


def _tiles(run: Run) -> Iterator[Tile]:
    skips = sum(record.overflow for scaler in run.scalers for record in scaler.history)
    yield Tile("updates", f"{run.updates:,}")
    if run.updates:
        yield Tile("skipped", f"{skips:,}", f"{percent(100 * skips / run.updates)} %")
    for scaler in run.scalers:
        if scaler.history:
            which = f" of scaler {scaler.number + 1}" if len(run.scalers) > 1 else ""
            now, first = scaler.history[-1].new_scale, scaler.history[0].scale
            value, note = (power(now), "") if now < TINY else (f"{now:,.6g}", f"{power(now)}; ")
            yield Tile(f"scale{which}", value, f"{note}began at {power(first)}")


def _of_scaler(scaler: ScalerRun, scalers: int) -> Iterator[Section]:
    """The picture of a scale, and the list of the skips."""
    from lucid.amp.history._picture import draw

    key, which = _told_apart(scaler.number, scalers)
    history = scaler.history
    picture = Picture(png_of(draw(history)), _in_words(scaler), narrow=png_of(draw(history, narrow=True)))
    yield Section(f"scale{key}", f"The scale{which}, and where steps were skipped", pictures=(picture,))
    skips = [record for record in history if record.overflow]
    if skips:
        told = {cause["step"]: cause for cause in scaler.causes}
        rows = tuple(_skip_row(record, told.get(record.step)) for record in skips[:SHOWN])
        more = (f"The first {SHOWN} of {len(skips):,}.",) if len(skips) > SHOWN else ()
        yield Section(
            f"skips{key}", f"The skips{which}, one by one", more, table=Table(SKIPS, rows, "Show only updates with")
        )


def _told_apart(number: int, count: int) -> tuple[str, str]:
    """What an address and a heading say of the scaler with this number, where there are several."""
    return f"-{number + 1}" if number else "", f" of scaler {number + 1}" if count > 1 else ""


SKIPS = (
    Column("update", "The number of the update, from 0."),
    Column("scale", "The scale that was in force."),
    Column("kind", "Why the step was skipped, in a few words.", is_text=True),
    Column("where", "The module it began in, or the parameters whose gradients were not finite.", is_text=True),
    Column("found", "What was seen.", is_text=True),
)


def _skip_row(record: Any, told: dict[str, Any] | None) -> tuple[Cell, ...]:
    found = " ".join(_found(told["causes"])) if told else ""
    return (
        Cell(f"{record.step:,}", record.step),
        Cell(power(record.scale), record.scale),
        Cell(record.kind or "not known"),
        Cell(", ".join(record.where) or "–"),
        Cell(found or "–"),
    )


def _found(causes: list[dict[str, Any]]) -> Iterator[str]:
    """What was seen, once for all optimizers of which the same is told; whose it is where there are several."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for cause in causes:
        rank = f"rank {cause['rank']}" if any(other["rank"] != cause["rank"] for other in causes) else ""
        owner = " ".join(filter(None, (rank, cause.get("optimizer"))))
        owners.setdefault(tuple(cause["sentences"][:-1]), []).append(owner)
    for sentences, its in owners.items():
        names = ", ".join(filter(None, its)) if len(causes) > 1 else ""
        yield f"{names}: {' '.join(sentences)}" if names else " ".join(sentences)


def _in_words(scaler: ScalerRun) -> str:
    """What the picture of the scale shows, for those who do not see it."""
    history = scaler.history
    skips = sum(record.overflow for record in history)
    scales = [record.scale for record in history]
    return (
        f"The loss scale over {len(history):,} updates: it begins at {power(scales[0])}, moves between "
        f"{power(min(scales))} and {power(max(scales))} and ends at {power(history[-1].new_scale)}; "
        f"{skips:,} updates are marked as skipped."
    )


def _about(run: Run) -> Section:
    facts = run.facts
    words = [
        ("command", f"`{shlex.join(facts.get('command', []))}`"),
        ("ended", str(facts.get("ending") or "not yet, or it was killed")),
        ("versions", f"lucid-amp {facts.get('lucid')}, torch {facts.get('torch')}, Python {facts.get('python')}"),
        *((f"scaler {number}", _settings(its)) for number, its in enumerate(facts.get("scalers", []), 1)),
        *((f"model {number}", _model(its)) for number, its in enumerate(facts.get("models", []), 1)),
        *(("to be known", note) for note in facts.get("notes", [])),
    ]
    return Section("about", "About this run", words=tuple(words))


def _settings(its: dict[str, Any]) -> str:
    state = "" if its["enabled"] else ", disabled"
    settings = ", ".join(f"{name} {number:g}" for name, number in its["settings"].items())
    return f"`{its['class']}`{state}; {settings}" if settings else f"`{its['class']}`{state}"


def _model(its: dict[str, Any]) -> str:
    dtypes, devices = ", ".join(its["dtypes"]), ", ".join(its["devices"])
    return f"`{its['name']}` ({its['class']}), {its['parameters']:,} parameters in {dtypes} on {devices}"
