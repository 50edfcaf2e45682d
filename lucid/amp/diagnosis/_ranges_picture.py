"""The picture that explains loss scaling: a histogram of log₂|gradient| for each row of a range report.

Knows matplotlib, and draws what float16 can hold as a window over each histogram. What lies outside is told
apart by hatching, not by colour. Refuses to measure anything.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from lucid.amp.diagnosis._ranges_shown import percent, power
from lucid.amp.diagnosis._spread import LOWEST_BIT, SMALLEST_NORMAL_BIT, TOP_BIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lucid.amp.diagnosis._ranges import Ranges, Row

__all__ = ["plot"]

COLUMNS = 3
WINDOW, GHOST = "#e4ecf4", "#555555"
MARGIN = 6
# What a bar is: from which exponent to below which, how it is filled. Light, dark and hatched differ in grey too.
# What is rounded up to 2⁻²⁴ lies one bin below the window.
BARS: tuple[tuple[float, float, dict[str, str]], ...] = (
    (-math.inf, LOWEST_BIT - 1, {"color": "white", "hatch": "/////"}),
    (LOWEST_BIT - 1, SMALLEST_NORMAL_BIT, {"color": "#8fb4d9"}),
    (SMALLEST_NORMAL_BIT, TOP_BIT, {"color": "#1f4e79"}),
    (TOP_BIT, math.inf, {"color": "white", "hatch": "xxxxx"}),
)


def plot(report: Ranges, path: str | os.PathLike[str] | None, at_most: int) -> Figure:
    """Draw the report; see ``Ranges.plot``."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ranges(...).plot() needs matplotlib: pip install 'lucid-amp[demo]' (in a checkout: pip install '.[demo]')"
        ) from error
    rows = _chosen(report.rows, at_most)
    deep = math.ceil(len(rows) / COLUMNS)
    figure = Figure(figsize=(4.0 * COLUMNS, 1.9 * deep + 1.4), layout="constrained")
    axes = figure.subplots(deep, COLUMNS, squeeze=False, sharex=True)
    moved = _moved(report) if any(row.spread.bins for row in rows) else 0
    left, right = _limits(rows, moved)
    for place, row in zip(axes.flat, rows, strict=False):
        _panel(place, row, moved, left, right)
    for place in axes.flat[len(rows) :]:
        place.set_visible(False)
    for column in range(COLUMNS):
        drawn = [place for place in axes[:, column] if place.get_visible()]
        if drawn:
            drawn[-1].set_xlabel("log₂ |gradient|")
            drawn[-1].tick_params(labelbottom=True)
    figure.suptitle(_title(report, moved, len(rows)), fontsize=11)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _chosen(rows: tuple[Row, ...], at_most: int) -> list[Row]:
    """All rows, or the first, the last and those between at even distances."""
    if len(rows) <= at_most:
        return list(rows)
    gap = (len(rows) - 1) / max(at_most - 1, 1)
    places = {round(step * gap) for step in range(max(at_most, 1))}
    return [rows[place] for place in sorted(places)]


def _moved(report: Ranges) -> int:
    """By how many columns the other outline lies to the right: where scaling brings them, or took them from."""
    if report.scale is not None:
        return -round(math.log2(report.scale))
    best = report.recommended_scale
    return report.shift_to(best) if best is not None else 0


def _limits(rows: list[Row], moved: int) -> tuple[int, int]:
    """The exponents that are drawn: float16's window, and everything that lies outside it."""
    bins = [exponent for row in rows for exponent in row.spread.bins]
    bins += [exponent + moved for exponent in bins]
    low, high = min(bins, default=LOWEST_BIT), max(bins, default=TOP_BIT)
    return max(min(low, LOWEST_BIT - 1) - 3, LOWEST_BIT - 60), max(high + 2, TOP_BIT + MARGIN)


def _panel(axes: Any, row: Row, moved: int, left: int, right: int) -> None:
    shares = row.spread.shares()
    axes.axvspan(LOWEST_BIT, TOP_BIT, color=WINDOW, lw=0, zorder=0)
    for edge, style in ((LOWEST_BIT, "-"), (SMALLEST_NORMAL_BIT, ":"), (TOP_BIT, "-")):
        axes.axvline(edge, color="black", lw=0.8, ls=style, zorder=3)
    for least, below, look in BARS:
        shown = {exponent: share for exponent, share in shares.items() if least <= exponent < below}
        axes.bar(list(shown), list(shown.values()), 1.0, align="edge", edgecolor="black", lw=0.4, zorder=2, **look)
    if moved and shares:
        edges = range(left, right + 1)
        axes.stairs(
            [shares.get(edge - moved, 0.0) for edge in edges[:-1]], edges, color=GHOST, lw=1.2, ls="--", zorder=4
        )
    zero = row.fate().zero
    if zero:
        axes.bar([left], [zero], 2.0, align="edge", color="black", lw=0, zorder=2)
        axes.set_title(f"zero {percent(zero)} %", fontsize=8, loc="right")
    axes.set_xlim(left, right)
    axes.set_title(
        row.name if row.what == "parameter" else f"{row.name or 'the model'} (output)", fontsize=9, loc="left"
    )
    axes.set_ylabel("%", fontsize=8)
    axes.tick_params(labelsize=8)
    _tell_not_finite(axes, row)


def _tell_not_finite(axes: Any, row: Row) -> None:
    """What no bar can show: inf and NaN; in large letters where nothing else is there."""
    spread = row.spread
    counts = {what: count for what, count in (("inf", spread.inf), ("NaN", spread.nan)) if count}
    middle = {"x": 0.5, "ha": "center", "transform": axes.transAxes, "zorder": 5}
    if spread.bins or spread.zero:
        words = ", ".join(f"{what} {percent(spread.percent(count))} %" for what, count in counts.items())
        if words:
            box = {"boxstyle": "square,pad=0.2", "facecolor": "white", "edgecolor": "none"}
            axes.text(y=0.94, s=words, fontsize=8, va="top", bbox=box, **middle)
        return
    axes.text(y=0.5, s=f"all {' or '.join(counts)}" if counts else "no elements", fontsize=12, va="center", **middle)
    axes.set_yticks([])
    axes.set_ylabel("")


def _title(report: Ranges, moved: int, drawn: int) -> str:
    what = f"Gradients scaled by {power(math.log2(report.scale))}" if report.scale is not None else "Gradients unscaled"
    ghost = "where they would lie unscaled" if report.scale is not None else f"scaled by {power(moved)}"
    lines = [f"{what}; dashed: {ghost}" if moved else what]
    if drawn < len(report.rows):
        lines[0] += f"; {drawn} of {len(report.rows)} gradients"
    lines.append(
        "Shaded: what float16 holds, 2⁻²⁴ … 2¹⁶. Bars: dark in full, light with fewer bits, hatched lost, black zero."
    )
    return "\n".join(lines)
