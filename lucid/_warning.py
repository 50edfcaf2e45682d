"""A warning that points to the user's line, whatever stands between it and us.

Knows which frames are this package's or PyTorch's. Refuses to know what is warned of.
"""

from __future__ import annotations

import sys
import warnings

INSIDE = ("lucid", "torch")
"""The packages whose frames are passed over: a user's line is the next one that is in neither."""


def warn(message: str) -> None:
    """Warn of something in the name of the nearest line outside; ``filterwarnings(module=...)`` goes by that one.

    The frames are counted, since their number differs: a subclass, a listener's stand-in and a compiler's wrapper may
    lie between.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
