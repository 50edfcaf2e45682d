"""A range report in words and as a table: plain, in a terminal, on a page.

Knows sentences, columns and how many digits a person reads. Refuses to measure anything.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lucid.amp.diagnosis._spread import LARGEST
from lucid.amp.diagnosis._words import few, number

if TYPE_CHECKING:
    from rich.table import Table

    from lucid.amp.diagnosis._ranges import Ranges, Row

__all__ = ["COLUMNS", "TINY", "cells", "findings", "page", "percent", "power", "table", "text"]

TOLERABLE, TOLERABLE_IN_ONE = 1.0, 10.0
"""Percent of what is not zero that may be flushed, of all gradients and of one, where float16 is said to suit them."""

TINY = 1e-3
"""Of a scale below this the digits say less than the power of two."""

SHOWN_SHIFTS = (-8, -4, 0, 4, 8)
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LEGEND = (
    "zero, subn.: percent exactly zero, and subnormal in float16. bits: powers of two left below 65504. "
    "Last columns, at the scale times so much: ↓ percent flushed to zero, ↑ percent overflowing."
)
_NOT_BY_ITSELF = (
    "That gradients are flushed does not by itself mean that a network fails to learn: "
    "what counts is whether the layers that have to learn still get some."
)


def power(exponent: float) -> str:
    """2 to the power of a whole number, in print."""
    return f"2{str(round(exponent)).translate(_RAISED)}"


COLUMNS = (
    "gradient",
    "largest",
    "median",
    "zero",
    "subn.",
    "bits",
    *(f"×{power(shift)}" if shift else "×1" for shift in SHOWN_SHIFTS),
)


def percent(value: float) -> str:
    """A percentage for people: one digit behind the point where it is small, never a 0 or 100 that is not one."""
    if value in (0.0, 100.0):
        return f"{value:.0f}"
    if value < 0.1:
        return "<0.1"
    if value > 99.9:
        return ">99.9"
    return f"{value:.1f}"


def cells(row: Row) -> tuple[str, ...]:
    """A row's text under each of ``COLUMNS``."""
    now, bits = row.fate(), row.spread.unused_bits
    name = row.name if row.what == "parameter" else f"{row.name or 'the model'} (output)"
    return (
        f"{name} [{row.not_finite:,} not finite]" if row.not_finite else name,
        number(row.largest),
        number(row.median),
        percent(now.zero),
        percent(now.subnormal),
        "–" if bits is None else f"{bits:.1f}",
        *(_fate(row, shift) for shift in SHOWN_SHIFTS),
    )


def _fate(row: Row, shift: int) -> str:
    fate = row.fate(shift)
    parts = [f"{percent(fate.flush)}↓" if fate.flush else "", f"{percent(fate.overflow)}↑" if fate.overflow else ""]
    return " ".join(filter(None, parts)) or "·"


def text(report: Ranges) -> str:
    """The findings, then the table, in plain characters."""
    rows = [COLUMNS, *(cells(row) for row in report.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    return "\n".join([*findings(report), "", *lines, "", _LEGEND])


def _aligned(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"


def table(report: Ranges) -> Table:
    """The table for rich."""
    try:
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ranges(...).table() needs rich: pip install 'lucid-amp[demo]' (in a checkout: pip install '.[demo]')"
        ) from error
    grid = Table(caption=_LEGEND, header_style="bold", caption_justify="left", box=None, pad_edge=False)
    rows = [cells(row) for row in report.rows]
    grid.add_column(COLUMNS[0], overflow="fold")
    for place, column in enumerate(COLUMNS[1:], 1):
        # Names may be folded in a narrow terminal; a number that was cut off would be another number.
        widest = max([len(column), *(len(row[place]) for row in rows)])
        grid.add_column(column, justify="right", no_wrap=True, min_width=widest)
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def page(report: Ranges) -> str:
    """The findings and the table as HTML."""
    rows = [COLUMNS, *(cells(row) for row in report.rows)]
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    sentences = "<br>".join(html.escape(sentence) for sentence in [*findings(report), _LEGEND])
    return f"<p>{sentences}</p><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def findings(report: Ranges) -> list[str]:
    """What the numbers say."""
    return [
        *(_with_scaler(report) if report.scale is not None else _without_scaler(report)),
        *_inside_the_backward(report),
        *_recommendation(report),
        *_beyond_gradients(report),
        _NOT_BY_ITSELF,
    ]


def _with_scaler(report: Ranges) -> Iterator[str]:
    now = report.fate()
    yield (
        f"At scale {_in_force(report.scale or 1.0)}, of the gradients' elements {percent(now.zero)} % are exactly zero "
        f"(flushed ones among them), {percent(now.subnormal)} % subnormal in float16, "
        f"{percent(now.flush)} % would be flushed to zero, {percent(now.overflow)} % would overflow."
    )


def _without_scaler(report: Ranges) -> Iterator[str]:
    now = report.fate()
    yield (
        f"Unscaled, float16 would flush {percent(now.flush)} % of the gradients' elements to zero, keep "
        f"{percent(now.subnormal)} % with fewer bits and overflow on {percent(now.overflow)} %; "
        f"{percent(now.zero)} % are exactly zero anyway."
    )
    if report.recommended_scale is None:
        return
    shift = report.shift_to(report.recommended_scale)
    best, worst = _flushed(report.rows, shift), max(report.rows, key=lambda row: row.flushed(shift))
    if now.overflow == 0 and max(row.flushed() for row in report.rows) <= TOLERABLE:
        yield "float16 would work here for these gradients, even without scaling; a scaler only adds safety."
    elif best <= TOLERABLE and worst.flushed(shift) <= TOLERABLE_IN_ONE:
        yield f"float16 would work here for these gradients, with a scale near {_scale(report.recommended_scale)}."
    else:
        yield (
            f"These gradients span more than float16 holds: even at the best scale, {percent(best)} % of what is not "
            f'zero is flushed, most in "{worst.name}" ({percent(worst.flushed(shift))} %). bfloat16 would keep them.'
        )


def _inside_the_backward(report: Ranges) -> Iterator[str]:
    """What is lost at a module's output is lost to every layer before it: no parameter's gradient shows that."""
    worst = max((row for row in report.rows if row.what == "output"), key=lambda row: row.flushed(), default=None)
    if worst is not None and worst.flushed() > TOLERABLE:
        yield (
            f"Inside the backward most is flushed at the output of {few([worst.name])}: {percent(worst.flushed())} % "
            "of what is not zero, and with it as much of the gradients of all layers before."
        )


def _flushed(rows: Iterable[Row], shift: int) -> float:
    """Percent of all that is not zero which is flushed."""
    flushed = kept = 0.0
    for row in rows:
        alive = row.spread.elements - row.spread.zero
        flushed += row.flushed(shift) * alive
        kept += alive
    return flushed / kept if kept else 0.0


def _in_force(scale: float) -> str:
    """A scale in digits; a tiny one as a power of two, where it is one."""
    exponent = math.log2(scale)
    return power(exponent) if scale < TINY and exponent.is_integer() else number(scale)


def _scale(scale: float) -> str:
    return f"{power(math.log2(scale))} ({number(scale)})"


def _recommendation(report: Ranges) -> Iterator[str]:
    best = report.recommended_scale
    if best is None:
        yield "No scale can be recommended: all gradients are zero or not finite."
        return
    shift = report.shift_to(best)
    yield (
        f"Recommended scale: {_scale(best)}, the largest power of two that leaves three bits between the largest of "
        f"these gradients and 65504. There {percent(_flushed(report.rows, shift))} % of what is not zero is flushed."
    )
    if report.scale is not None:
        yield _compared(report, shift)
    if not any(row.what == "output" for row in report.rows):
        yield (
            "Gradients inside the backward may be larger, and smaller, than those of the parameters; "
            "watch(model, scaler, outputs=1) measures those at the modules' outputs as well."
        )


def _compared(report: Ranges, shift: int) -> str:
    if shift > 1:
        return f"The scale in force is {power(shift)} times smaller: it has room to grow, and grows by itself."
    if shift >= -1:
        return "The scale in force fits."
    larger, bits = f"The scale in force is {power(-shift)} times larger", _bits_left(report)
    if bits < 0:
        return f"{larger}, beyond what float16 holds: expect skipped steps until it has come down."
    left = {0: "less than one bit", 1: "one bit"}.get(bits, f"{bits} bits")
    return f"{larger} and leaves {left} instead of three: a batch with larger gradients may cost a skipped step."


def _bits_left(report: Ranges) -> int:
    """How many times the scale in force can double before the largest gradient is beyond 65504; -1 where it is."""
    return max(-1, math.floor(math.log2(LARGEST / max(row.spread.largest for row in report.rows))))


def _beyond_gradients(report: Ranges) -> Iterator[str]:
    broken = [row.name for row in report.rows if row.not_finite]
    if broken:
        yield f"Not finite, so that the rest alone is told of: {few(broken)}."
    for row in report.rows:
        if row.largest_output is not None and not row.largest_output <= LARGEST:
            largest = number(row.largest_output)
            beyond = f"reaches {largest}: beyond 65504 at any scale"
            yield f'The output of "{row.name}" {"holds NaN" if math.isnan(row.largest_output) else beyond}.'
    if report.without:
        yield f"Without a gradient: {few(list(report.without))}."
    if report.partial:
        yield "The gradients are spread over ranks; told is this rank's part."
