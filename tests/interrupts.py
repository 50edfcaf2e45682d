"""Ctrl-C at any line that is wanted."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(call: Callable[[], object], line: int, files: tuple[str, ...]) -> bool:
    """Call it and raise KeyboardInterrupt at that line of those it runs in these files; False where it runs fewer."""
    left = iter(range(line))

    def watch(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(left, None) is None:
            raise KeyboardInterrupt
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
