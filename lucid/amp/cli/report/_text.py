"""Numbers, times and pictures as a report writes them.

Knows how a scale, a time span and a count read best. Refuses to know what they are about.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from lucid.amp.diagnosis._ranges_shown import power as raised

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plural", "png_of", "power", "span", "times"]


def power(scale: float) -> str:
    """A scale as people think of it: 2¹⁵ where it is a power of two, else its number."""
    if 0 < scale < math.inf and math.frexp(scale)[0] == 0.5:
        return raised(math.log2(scale))
    return f"{scale:g}"


def span(seconds: float) -> str:
    """A time span in its two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def times(count: int) -> str:
    """How often something happened."""
    return "once" if count == 1 else f"{count:,} times"


def png_of(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
