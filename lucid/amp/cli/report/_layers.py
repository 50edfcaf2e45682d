"""The part of a report about gradients: what float16 makes of each, as a picture, a table and a finding.

Knows which numbers of a range report a reader wants side by side. Refuses to measure any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lucid.amp.cli.report._content import Cell, Column, Finding, Picture, Section, Table
from lucid.amp.cli.report._text import png_of, power
from lucid.amp.diagnosis._ranges import HEADROOM, Ranges, Row
from lucid.amp.diagnosis._ranges_shown import percent
from lucid.amp.diagnosis._spread import LARGEST
from lucid.amp.diagnosis._words import number

__all__ = ["finding_of", "section_of"]

MANY = 5.0
"""Percent of the elements; where more are subnormal though the scale has room to grow, it is worth a word."""

COLUMNS = (
    Column("gradient", "The parameter, or the module whose output it is.", is_text=True),
    Column("elements", "How many numbers it has."),
    Column("largest", "Its largest finite magnitude, unscaled."),
    Column("median", "The median magnitude of what is neither zero nor infinite, unscaled."),
    Column("zero %", "Exactly zero. In a float16 run, what was too small for it is among these.", is_share=True),
    Column("subnormal %", "Below 2⁻¹⁴ while scaled: kept by float16 with fewer digits.", is_share=True),
    Column("flushed %", "Would become zero in float16 at the scale in force.", is_share=True),
    Column("overflow %", "Would become infinite in float16 at the scale in force.", is_share=True),
    Column("bits unused", "How many times the scale can double before the largest element reaches 65504."),
    Column("best scale", f"The largest power of two that leaves {HEADROOM} bits free for larger batches."),
    Column("output", "Of a module: the largest magnitude that it put out; beyond 65504 no scale can help."),
)


def section_of(ranges: Ranges, step: int, key: str, which: str) -> Section:
    """Picture and table of one sample."""
    when = f"Sampled at update {step:,}{which}, as the backward left the gradients."
    drawn = png_of(ranges.plot(at_most=12))
    picture = Picture(drawn, _in_words(ranges))
    table = Table(COLUMNS, tuple(_row(row) for row in ranges.rows), "Show only gradients with")
    return Section(
        f"ranges{key}", f"Gradients in float16's range{which}", (when, *ranges.findings()), (picture,), table
    )


def finding_of(ranges: Ranges, step: int) -> Iterator[Finding]:
    """What the sample asks for: whether float16 suits these gradients, and at which scale."""
    sentences = ranges.findings()
    if ranges.scale is None:
        # The second sentence answers whether float16 would work, where that can be answered.
        yield Finding("fine", "What float16 would make of these gradients", tuple(sentences[:3]))
        return
    now, best = ranges.fate(), ranges.recommended_scale
    room = ranges.shift_to(best) if best is not None else 0
    if best is not None and room > 1 and now.subnormal > MANY:
        yield Finding(
            "look",
            f"{percent(now.subnormal)} % of the gradients' elements are subnormal in float16, and the scale has room",
            (
                f"At update {step:,} the scale was {power(ranges.scale)}; these gradients leave room up to "
                f"{power(best)}. {percent(now.zero)} % are exactly zero.",
            ),
            f"Begin higher, `init_scale={best:g}`, or let the scale grow sooner with a shorter `growth_interval`. "
            "Flushed gradients do not by themselves mean that a network fails to learn.",
        )


def _in_words(ranges: Ranges) -> str:
    fate = ranges.fate()
    at = f"at scale {power(ranges.scale)}" if ranges.scale is not None else "unscaled"
    return (
        f"Histograms of the gradients' magnitudes with float16's window drawn over them, {at}: "
        f"{percent(fate.zero)} % exactly zero, {percent(fate.subnormal)} % subnormal, "
        f"{percent(fate.flush)} % below the window, {percent(fate.overflow)} % above it. The table has the numbers."
    )


def _row(row: Row) -> tuple[Cell, ...]:
    fate, bits = row.fate(), row.spread.unused_bits
    name = row.name if row.what == "parameter" else f"{row.name or 'the model'} (output)"
    best = 2.0 ** (math.floor(math.log2(LARGEST / row.largest)) - HEADROOM) if row.largest > 0 else None
    return (
        Cell(f"{name} [{row.not_finite:,} not finite]" if row.not_finite else name),
        Cell(f"{row.spread.elements:,}", row.spread.elements),
        Cell(number(row.largest), row.largest),
        Cell(number(row.median), row.median),
        *(Cell(percent(share), share) for share in (fate.zero, fate.subnormal, fate.flush, fate.overflow)),
        Cell("–") if bits is None else Cell(f"{bits:.1f}", bits),
        Cell("–") if best is None else Cell(power(best), best),
        Cell("–") if row.largest_output is None else Cell(number(row.largest_output), row.largest_output),
    )
