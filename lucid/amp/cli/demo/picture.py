"""The demo as one picture: the losses, the gradients without and with scaling, the scale's sawtooth.

Knows matplotlib, without a window and without its global state. Refuses to know what the numbers mean:
titles come from the words.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lucid.amp.cli.demo import words
from lucid.amp.cli.demo.flow import HALF_FROM, HALF_TO, HIGHEST, LOWEST, Histogram
from lucid.amp.cli.demo.record import GUESS, Record
from lucid.amp.cli.demo.task import BFLOAT16, FLOAT32, SCALED, UNSCALED, Way

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Okabe and Ito's colours, which the colour-blind tell apart; dashes and markers do it in black and white,
# and tell lines apart that lie on each other.
_LINES: dict[Way, dict[str, Any]] = {
    FLOAT32: {"color": "#000000", "linestyle": "-", "linewidth": 3.2, "marker": "o"},
    UNSCALED: {"color": "#D55E00", "linestyle": "-", "linewidth": 2.0, "marker": "X"},
    SCALED: {"color": "#56B4E9", "linestyle": "--", "linewidth": 1.8, "marker": "^"},
    BFLOAT16: {"color": "#009E73", "linestyle": ":", "linewidth": 2.2, "marker": "s"},
}
_KEPT = "#0072B2"
_LOST = "#D55E00"
_TRUE = "#BBBBBB"
_WINDOW = "#FBF6D0"

_ZEROS_AT = LOWEST - 4
"""Where the pile of zeros stands: log₂ 0 has no place of its own on the axis."""


def draw(record: Record, path: Path) -> None:
    """Draw a record and save it as a PNG of 1650 × 2175 pixels.

    Raises:
        OSError: the file could not be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 14.5), dpi=150, layout="constrained")
    parts: Any = figure.subfigures(4, 1, height_ratios=[3.3, 3.3, 3.1, 3.3], hspace=0.02)
    true = record.flows[FLOAT32]
    _draw_losses(parts[0], record)
    _draw_flow(parts[1], words.title_without_scaling(record), record.flows[UNSCALED], true)
    _draw_flow(parts[2], words.title_with_scaling(record), record.flows[SCALED], true)
    _draw_scale(parts[3], record)
    figure.savefig(path, format="png")


def _draw_losses(figure: SubFigure, record: Record) -> None:
    axes = figure.subplots()
    for place, (way, losses) in enumerate(record.losses.items()):
        # Each line has its markers at steps of its own.
        every = max(len(losses) // 12, 1)
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, markevery=(place * every // 4, every), label=way.name, **_LINES[way])
    axes.axhline(GUESS, color="#777777", linewidth=0.8)
    last = max(map(len, record.losses.values()))
    axes.text(last, GUESS * 0.98, f"a guess: ln 10 = {GUESS:.4f}", ha="right", va="top", fontsize=9)
    axes.set_xlabel(f"step (seed {record.settings['seed']})")
    axes.set_ylabel("training loss (nats)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(frameon=False, loc="lower left", handlelength=4)
    _finish(figure, axes, words.title_of_losses(record))


def _draw_flow(figure: SubFigure, title: str, kept: tuple[Histogram, ...], true: tuple[Histogram, ...]) -> None:
    panels = figure.subplots(1, len(kept), sharey=True)
    for axes, solid, light in zip(panels, kept, true, strict=True):
        _draw_layer(axes, solid, light)
        _finish(figure, axes, title)
    panels[0].set_ylabel("share of the values (%)")
    panels[0].legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(0.93, 0.9))


def _draw_layer(axes: Axes, solid: Histogram, light: Histogram) -> None:
    axes.axvspan(HALF_FROM, HALF_TO, color=_WINDOW, linewidth=0)
    for edge in (HALF_FROM, HALF_TO):
        axes.axvline(edge, color="black", linewidth=0.8, linestyle="--")
    window = f"float16 holds {words.power(HALF_FROM)} … {words.power(HALF_TO)}"
    axes.text((HALF_FROM + HALF_TO) / 2, 107, window, ha="center", va="top", fontsize=8)
    powers = range(LOWEST, HIGHEST + 1)
    outline: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.5}
    axes.bar(powers, _percent(light.shares), 1, align="edge", color=_TRUE, label="float32, unscaled")
    axes.bar(powers, _percent(solid.shares), 1, align="edge", color=_KEPT, label="float16", **outline)
    zeros = 100 * solid.zeros
    axes.bar(_ZEROS_AT, zeros, 4, color=_LOST, hatch="///", label="float16, exactly 0", **outline)
    axes.annotate(f"{zeros:.0f}%", (_ZEROS_AT, zeros), (0, 2), textcoords="offset points", ha="center")
    ticks = range(-40, HIGHEST, 8)
    axes.set_xticks([_ZEROS_AT, *ticks], ["zeros", *map(str, ticks)], fontsize=8)
    axes.set_ylim(0, 110)
    axes.set_title(f"layer {solid.layer}", fontsize=10)
    axes.set_xlabel("log₂ |gradient| at the layer's output, step 1", fontsize=9)


def _draw_scale(figure: SubFigure, record: Record) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    steps = range(1, len(record.updates) + 1)
    powers = [math.log2(update.scale) for update in record.updates]
    axes.step(steps, powers, where="mid", color="black", linewidth=1)
    for label, marker, colour, moved in (
        ("overflow: step skipped, scale halved", "x", _LOST, [u.overflow for u in record.updates]),
        ("growth: scale doubled", "^", _KEPT, [u.new_scale > u.scale for u in record.updates]),
    ):
        x, y = (list(itertools.compress(values, moved)) for values in (steps, powers))
        axes.scatter(x, y, marker=marker, s=60, color=colour, label=label, zorder=3)
    axes.yaxis.set_major_formatter(lambda power, _: words.power(power))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("scale (a factor, log axis)")
    axes.margins(x=0.01)
    axes.legend(frameon=False)
    _finish(figure, axes, words.title_of_scale(record))


def _percent(shares: tuple[float, ...]) -> list[float]:
    return [100 * share for share in shares]


def _finish(figure: SubFigure, axes: Axes, title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontweight="bold")
