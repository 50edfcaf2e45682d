"""What watches must not hurt: an exception of ours becomes a note in the report.

Knows that the script comes first. Refuses to know what failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

P = ParamSpec("P")


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """A method whose failure is noted, by its object's ``note``, instead of ending the script."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        """Call the method, and note what it raises."""
        try:
            method(*args, **kwargs)
        except Exception as error:
            owner: Any = args[0]
            owner.note(f"{method.__name__.replace('_', ' ').strip()} failed: {type(error).__name__}: {error}")

    return guarded
