"""How long a call takes, to the end of what it started on a device.

Knows clocks. Refuses to know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Call it once, the device being idle before, and wait until the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    begin = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin
