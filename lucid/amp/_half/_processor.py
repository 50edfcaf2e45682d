"""Which arithmetic this processor is faster with, asked of PyTorch, else measured once for each dtype.

Knows the four kinds of operator whose speed differs, and a small step of each. Refuses to know how they are
replaced.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

KINDS = ("product", "convolution", "attention", "recurrence")

# What does arithmetic in a dtype, as torch.cpu.get_capabilities calls it on x86_64.
_UNITS = {torch.float16: ("amx_fp16", "avx512_fp16"), torch.bfloat16: ("amx_bf16", "avx512_bf16")}

_RUNS = 5
_PATIENCE = 0.1  # seconds for a kind
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


def _fastest(steps: Sequence[Callable[[], Tensor]]) -> list[float]:
    """The fewest seconds of this thread's work for a forward and backward pass of each, run in turn."""
    fewest = [math.inf] * len(steps)
    end = time.perf_counter() + _PATIENCE
    for run in range(_RUNS):
        for place, step in enumerate(steps):
            start = time.thread_time()
            step().sum().backward()  # type: ignore[no-untyped-call]
            fewest[place] = min(fewest[place], time.thread_time() - start)
        # The first run also makes what PyTorch keeps. A crowded machine gets no more than it needs.
        if run > 0 and time.perf_counter() > end:
            break
    return fewest


def _picked(make: Callable[[torch.dtype], Callable[[], Tensor]], dtype: torch.dtype) -> str:
    try:
        native, wide = _fastest([make(dtype), make(torch.float32)])
    except RuntimeError:  # PyTorch has no such operator in this dtype here
        return "float32"
    return "native" if native <= _OVERHEAD * wide else "float32"


def _lacks_units(dtype: torch.dtype) -> bool:
    """Whether PyTorch says that the processor computes nothing in ``dtype``; False if it does not say."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    told = ask() if ask is not None else {}
    return told.get("architecture") == "x86_64" and not any(told.get(unit) for unit in _UNITS[dtype])


@functools.cache
def faster(dtype: torch.dtype) -> dict[str, str]:
    """For each kind of operator, "native" or "float32": what this processor does sooner in ``dtype``."""
    if _lacks_units(dtype):
        return dict.fromkeys(KINDS, "float32")
    picked: dict[str, str] = {}

    def measure() -> None:
        """Time both ways for each kind."""
        picked.update({kind: _picked(make, dtype) for kind, make in zip(KINDS, _STEPS, strict=True)})

    # A thread of its own is in nobody's scope, mode or hook.
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return picked
