"""The picture of a history: the scale over the updates, skips marked by kind, percentages below.

Knows matplotlib, colours and shapes. Refuses to know where the records come from. Each kind of skip has a
shape of its own beside its colour, so that the picture reads in black and white too; the colours are those of
Okabe and Ito (2008), which the colour-blind can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lucid.amp.diagnosis._kinds import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lucid.amp.history import Record

__all__ = ["LOOKS", "Look", "draw"]

INK, GREY, LINE = "#222222", "#6b6b6b", "#0072b2"


class Look(NamedTuple):
    """How a kind of skip is marked.

    Attributes:
        words: what the legend says.
        colour: of the mark.
        shape: matplotlib's marker.
    """

    words: str
    colour: str
    shape: str


LOOKS: dict[str | None, Look] = {
    Kind.BACKWARD.value: Look("the backward overflowed", "#e69f00", "v"),
    Kind.EARLIER.value: Look("an accumulated backward overflowed", "#f0e442", "<"),
    Kind.LOSS.value: Look("the loss was not finite", "#d55e00", "X"),
    Kind.STALE.value: Look("the gradients were never cleared", "#cc79a7", "s"),
    Kind.RANK.value: Look("another rank overflowed", "#009e73", "D"),
    None: Look("cause not known", "#56b4e9", "o"),
}


def draw(records: Sequence[Record], narrow: bool = False) -> Figure:
    """The picture of these records, without touching matplotlib's global state.

    Args:
        records: oldest first.
        narrow: make it for a phone, 4.4 inches wide instead of 9.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    sampled = any(record.zero is not None for record in records)
    size = (4.4, 5.4 if sampled else 4.0) if narrow else (9.0, 5.2 if sampled else 3.8)
    figure = Figure(figsize=size, dpi=160 if narrow else 110, layout="constrained")
    heights = [2, 1] if sampled else [1]
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    _draw_scale(rows[0, 0], records)
    if sampled:
        _draw_percentages(rows[1, 0], [record for record in records if record.zero is not None])
    for axes in rows[:, 0]:
        _legend_above(axes, columns=1 if narrow and axes is rows[0, 0] else 2)
    rows[-1, 0].set_xlabel("update")
    rows[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _draw_scale(axes: Any, records: Sequence[Record]) -> None:
    _tidy(axes, "loss scale")
    if not records:
        axes.text(0.5, 0.5, "no update was recorded", ha="center", transform=axes.transAxes, color=GREY)
        axes.set_yticks([])
        return
    corners = _corners(records)
    axes.plot(*zip(*corners, strict=True), color=LINE, linewidth=1.6, drawstyle="steps-post", label="scale")
    for kind, skips in _by_kind(records).items():
        look = LOOKS.get(kind, LOOKS[None])
        axes.plot(
            [record.step for record in skips],
            [record.scale for record in skips],
            linestyle="none",
            marker=look.shape,
            markersize=8 if len(skips) <= 100 else 5,
            markerfacecolor=look.colour,
            markeredgecolor=INK,
            markeredgewidth=0.8,
            label=f"skipped: {look.words} ({len(skips)}×)",
        )
    _leave_room(axes, [scale for _, scale in corners])
    axes.set_yscale("log", base=2)


def _corners(records: Sequence[Record]) -> list[tuple[int, float]]:
    """The points at which the line bends: a million updates at one scale are two points."""
    corners = [(records[0].step, records[0].scale)]
    for record in records:
        if record.scale != corners[-1][1]:
            corners.append((record.step, record.scale))
    return [*corners, (records[-1].step + 1, records[-1].new_scale)]


def _by_kind(records: Sequence[Record]) -> dict[str | None, list[Record]]:
    """The updates with an overflow, by kind, in the order of the table of looks."""
    kinds: dict[str | None, list[Record]] = {kind: [] for kind in LOOKS}
    for record in records:
        if record.overflow:
            kinds[record.kind if record.kind in LOOKS else None].append(record)
    return {kind: skips for kind, skips in kinds.items() if skips}


def _leave_room(axes: Any, scales: Sequence[float]) -> None:
    """At least four powers of two on the axis, with a little air above and below."""
    usable = [scale for scale in scales if 0 < scale < float("inf")] or [1.0]
    low, high = min(usable), max(usable)
    spread = max(1.0, (16 * low / high) ** 0.5)
    axes.set_ylim(low / spread / 1.5, high * spread * 1.5)


def _draw_percentages(axes: Any, sampled: Sequence[Record]) -> None:
    _tidy(axes, "% of gradients")
    steps = [record.step for record in sampled]
    marks: dict[str, Any] = {"markersize": 4, "linewidth": 1.4, "markevery": max(1, len(steps) // 60)}
    zero, subnormal = [record.zero for record in sampled], [record.subnormal or 0.0 for record in sampled]
    axes.plot(steps, zero, color=INK, linestyle="-", marker="o", label="exactly zero", **marks)
    axes.plot(steps, subnormal, color=LINE, linestyle="--", marker="s", label="subnormal in float16", **marks)
    top = max([*zero, *subnormal])  # type: ignore[type-var]
    axes.set_ylim(0, 105 if top > 40 else max(1.0, top * 1.25))  # type: ignore[operator]


def _legend_above(axes: Any, columns: int) -> None:
    if axes.get_legend_handles_labels()[0]:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(ncols=columns, frameon=False, fontsize=9, **place)


def _tidy(axes: Any, label: str) -> None:
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
