"""Which arithmetic this processor is faster with, measured once for each dtype.

Knows the four kinds of operator whose speed differs, and a small step of each. Refuses to know how they are
replaced.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

KINDS = ("product", "convolution", "attention", "recurrence")

_RUNS = 3
# What float32 arithmetic on half storage costs beside float32 itself.
_OVERHEAD = 1.2


def _product(dtype: torch.dtype) -> Callable[[], Tensor]:
    x = torch.ones(256, 128, dtype=dtype, requires_grad=True)
    weight = torch.ones(256, 128, dtype=dtype, requires_grad=True)
    return lambda: functional.linear(x, weight)


def _convolution(dtype: torch.dtype) -> Callable[[], Tensor]:
    x = torch.ones(4, 16, 16, 16, dtype=dtype, requires_grad=True)
    weight = torch.ones(16, 16, 3, 3, dtype=dtype, requires_grad=True)
    return lambda: functional.conv2d(x, weight, padding=1)


def _attention(dtype: torch.dtype) -> Callable[[], Tensor]:
    x = torch.ones(4, 4, 64, 32, dtype=dtype, requires_grad=True)
    return lambda: functional.scaled_dot_product_attention(x, x, x)


def _recurrence(dtype: torch.dtype) -> Callable[[], Tensor]:
    x, state = torch.ones(16, 16, 64, dtype=dtype), torch.zeros(1, 16, 64, dtype=dtype)
    weights = [torch.zeros(256, 64, dtype=dtype, requires_grad=True) for _ in range(2)]
    return lambda: torch.lstm(x, (state, state), weights, False, 1, 0.0, True, False, False)[0]


_STEPS = (_product, _convolution, _attention, _recurrence)


def _seconds(make: Callable[[torch.dtype], Callable[[], Tensor]], dtype: torch.dtype) -> float:
    """The fastest of a few forward and backward passes; infinite where PyTorch has none."""
    try:
        step = make(dtype)
        step().sum().backward()
        times = []
        for _ in range(_RUNS):
            start = time.perf_counter()
            step().sum().backward()
            times.append(time.perf_counter() - start)
    except RuntimeError:
        return float("inf")
    return min(times)


@functools.cache
def faster(dtype: torch.dtype) -> dict[str, str]:
    """For each kind of operator, "native" or "float32": what this processor does sooner in ``dtype``."""
    picked: dict[str, str] = {}

    def measure() -> None:
        for kind, make in zip(KINDS, _STEPS, strict=True):
            native = _seconds(make, dtype) <= _OVERHEAD * _seconds(make, torch.float32)
            picked[kind] = "native" if native else "float32"

    # A thread of its own is in nobody's scope, mode or hook.
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return picked
