"""The division inside a fused optimizer's own kernel: the gradients are read once before it, and written by it alone.

Knows which optimizers divide by a ``grad_scale`` themselves, and when nobody can see a difference. Refuses to
know whether a step lands: it is used for one that does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lucid.amp import _memory, _torch
from lucid.amp._division import Divisor
from lucid.amp._gradients import Gradients
from lucid.amp._reading import Reading

_EXACT = {torch.float32, torch.float64}
"""In these dtypes the gradient that is left behind is the quotient that the kernel uses."""

WORTHWHILE = 2**19
"""Bytes of a gradient, on average, from which on a read of it costs less than an operator that judges quotients."""


def divides(optimizer: Any, gradients: Gradients, divisor: Divisor) -> bool:
    """Whether the kernel of an optimizer that takes a factor is to divide: each gradient once, exactly and unseen."""
    kind: Any = type(optimizer)
    # The cheapest question first: a small model is told no before anything else is looked at.
    return (
        saves(gradients, divisor)
        and _torch.step_is_stock(optimizer)
        and not _torch.has_step_pre_hooks(optimizer)
        and not hasattr(optimizer, "grad_scale")
        # PyTorch hands the CPU's kernel a copy of a factor on CUDA without waiting until it is there.
        and len({device.type for device, _, _ in gradients.buckets}) == 1
        and all(group.get("fused") for group in optimizer.param_groups)
        and len(gradients.fresh) == len(gradients.values)
        and _memory.are_gapless(gradients.places)
        and all(parameter.grad is tensor for parameter, tensor in gradients.pairs)
        and all(_proved(kind, device, dtype) for device, dtype, _ in gradients.buckets)
    )


def saves(gradients: Gradients, divisor: Divisor) -> bool:
    """Whether the kernel's division saves anything.

    A read must come before it, and it writes the gradients as any division does. One operator that judges and divides
    moves no more bytes than that, and is faster; a division and a judgement after it move more.
    """
    large = _memory.extent(gradients.places) >= WORTHWHILE * max(len(gradients.fresh), 1)
    return large and divisor.passes(gradients.buckets) > 1


def refuse_left_over(optimizer: Any) -> None:
    """Refuse to step an optimizer whose kernel another scaler told to divide, or to leave the step out.

    PyTorch's scaler takes both away after a step, but not after one that raised.
    """
    groups = getattr(optimizer, "param_groups", ())
    if not (getattr(optimizer, _torch.TAKES_FACTOR, False) or any(group.get("fused") for group in groups)):
        return
    for name in ("grad_scale", "found_inf"):
        if getattr(optimizer, name, None) is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} has a {name} that another scaler left: its kernel would divide once "
                f"more, or leave the step out in silence. Call step() again after: del optimizer.{name}"
            )


def read(optimizer: Any) -> Reading:
    """Read the gradients of a fused optimizer, one group of the reading for each of its own groups."""
    groups = [[p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    return Reading([group for group in groups if group])


@contextmanager
def dividing(optimizer: Any, reading: Reading, divisor: Divisor) -> Iterator[None]:
    """Let the optimizer's step divide the gradients of a reading, which knows afterwards what it left scaled."""
    reading.remember()
    optimizer.grad_scale = divisor.tensors[reading.device, torch.float32]
    try:
        yield
    finally:
        del optimizer.grad_scale


@functools.cache
def _proved(optimizer: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether that kernel leaves the correctly rounded quotient behind; tried once, on two gradients."""
    if dtype not in _EXACT:
        return False
    # 35 and 36 elements are more than a vector register holds, and whole vectors or not: all of a kernel's loops.
    values = torch.tensor([1.0, 5.0, -7.0, 1e-3, 3e5] * 7 + [2.0], dtype=dtype, device="cpu")
    gradients = [values[:size].to(device, copy=True) for size in (35, 36)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        trial = optimizer(parameters, lr=1e-3, fused=True)
        trial.grad_scale = torch.full((), 3.0, dtype=torch.float32, device=device)
        # Unwrapped, so that no hook that is registered for all optimizers hears of the trial.
        with torch.no_grad():
            inspect.unwrap(optimizer.step)(trial)
    except torch.OutOfMemoryError:  # says nothing, and is asked again
        raise
    except RuntimeError:
        return False
    return all(torch.equal(gradient.cpu(), values[: gradient.numel()] / 3.0) for gradient in gradients)
