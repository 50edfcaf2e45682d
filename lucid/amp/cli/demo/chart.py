"""Charts made of characters: a falling loss, gradients by powers of two, the scale's sawtooth.

Knows how numbers become lines of text, in Unicode. Refuses to know colours, consoles and what the numbers
mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lucid.amp import ScaleUpdate
from lucid.amp.cli.demo.flow import HALF_FROM, HALF_TO, HIGHEST, LOWEST, Histogram

EIGHTHS = " ▁▂▃▄▅▆▇█"
KEPT = "█"
TRUE = "░"
EDGE = "│"
SKIP = "×"
GROWTH = "▲"
LEVEL = "─"

_TALL = 3
_LABEL = 9
_PILE = 3
_BINS_FROM = _LABEL + _PILE + 2


def curve(losses: Sequence[float], top: float, width: int) -> str:
    """A line of blocks as high as the loss, each the mean of its stretch; a ``?`` where it is not finite.

    Args:
        losses: one a step.
        top: the loss of a full block.
        width: columns; fewer where there are fewer losses.
    """
    width = min(width, len(losses))
    bounds = [len(losses) * place // width for place in range(width + 1)] if width else [0]
    means = [math.fsum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    # At least the lowest block: a blank would look like a step that was not made.
    return "".join(EIGHTHS[max(1, _eighths(mean / top))] if math.isfinite(mean) else "?" for mean in means)


def flow(kept: Sequence[Histogram], true: Sequence[Histogram]) -> list[str]:
    """Three lines a layer: the pile of zeros, then a column for each power of two.

    Args:
        kept: what half precision held, drawn solid.
        true: the same layers in float32 and unscaled, drawn light behind it.
    """
    lines = [" " * _BINS_FROM + _windowed_heading()]
    for solid, light in zip(kept, true, strict=True):
        labels = (f"layer {solid.layer}", "zeros", f"{solid.zeros:.1%}")
        pile = _columns([solid.zeros] * _PILE)
        bars = _overlaid(solid.shares, light.shares)
        for label, heap, bar in zip(labels, pile, bars, strict=True):
            lines.append(f"{label:<{_LABEL}}{heap}  {_windowed(bar)}")
        lines.append("")
    return [*lines[:-1], _ruler()]


def staircase(updates: Sequence[ScaleUpdate], width: int) -> list[str]:
    """The scale at each step on a log₂ axis, a row for each power of two, skips and growths marked.

    Args:
        updates: one a step; scales are powers of two.
        width: columns at most; each stands for the same number of steps.
    """
    each = math.ceil(len(updates) / (width - 9))
    powers = [round(math.log2(update.scale)) for update in updates]
    rows = {power: [" "] * math.ceil(len(updates) / each) for power in range(min(powers), max(powers) + 1)}
    for index, (power, update) in enumerate(zip(powers, updates, strict=True)):
        mark = _mark(update)
        if mark != LEVEL or rows[power][index // each] == " ":
            rows[power][index // each] = mark
    drawn = [f"{power:>3} {EDGE}{''.join(rows[power])}".rstrip() for power in sorted(rows, reverse=True)]
    return [*drawn, *_steps_axis(len(updates), each)]


def bar(share: float, width: int) -> str:
    """A bar of the given width, filled to a share of 0 to 1."""
    filled = round(share * width)
    return KEPT * filled + TRUE * (width - filled)


def _mark(update: ScaleUpdate) -> str:
    if update.overflow:
        return SKIP
    return GROWTH if update.new_scale > update.scale else LEVEL


def _eighths(share: float) -> int:
    return math.ceil(min(max(share, 0.0), 1.0) * 8)


def _columns(heights: Sequence[float]) -> list[str]:
    """Heights of 0 to 1 as columns of blocks, top line first."""
    eighths = [round(height * 8 * _TALL) for height in heights]
    return ["".join(EIGHTHS[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths) for row in reversed(range(_TALL))]


def _overlaid(solid: Sequence[float], light: Sequence[float]) -> list[str]:
    """Two histograms of the same bins, the light one seen wherever the solid one leaves a blank."""
    highest = max(*solid, *light) or 1.0
    front = _columns([share / highest for share in solid])
    back = _columns([share / highest for share in light])
    return [
        "".join(mine if mine != " " else TRUE if yours > EIGHTHS[1] else " " for mine, yours in zip(a, b, strict=True))
        for a, b in zip(front, back, strict=True)
    ]


def _windowed(bins: str) -> str:
    """The bins with float16's two edges drawn between them."""
    left, right = HALF_FROM - LOWEST, HALF_TO - LOWEST
    return f"{bins[:left]}{EDGE}{bins[left:right]}{EDGE}{bins[right:]}"


def _windowed_heading() -> str:
    words = " float16 holds these ".center(HALF_TO - HALF_FROM, LEVEL)
    return " " * (HALF_FROM - LOWEST) + f"├{words}┤"


def _ruler() -> str:
    """The powers of two below the bins, each under the column that begins with it."""
    line = [" "] * (HIGHEST - LOWEST + 4)
    for power in range(LOWEST + LOWEST % 8, HIGHEST, 8):
        place = power - LOWEST + (power >= HALF_FROM) + (power >= HALF_TO)
        line[place : place + len(str(power))] = str(power)
    return " " * _BINS_FROM + "".join(line).rstrip()


def _steps_axis(steps: int, each: int) -> list[str]:
    line = [" "] * (steps // each + 4)
    for step in range(0, steps + 1, 20):
        line[step // each : step // each + len(str(step))] = str(step)
    return [f"    └{LEVEL * math.ceil(steps / each)}", "     " + "".join(line).rstrip()]
