"""Operators that PyTorch itself makes of products: einsum, tensordot, inner and others.

Knows how to find the tensors in any arguments. Refuses to know the formulas: these are run once more to be
differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lucid.amp._half._operands import Operands, are_plain, tensors_in
from lucid.amp._half._wide import Replay, apply


def contraction(operands: Operands, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator all of whose tensors are cast, and whose one output is half."""
    tensors = list(tensors_in((args, kwargs)))
    if not tensors or not are_plain(*tensors):
        return NotImplemented
    call = functools.partial(_run, func, args, kwargs)
    return apply(Replay, call, operands.half, None, *(operands.cast(tensor) for tensor in tensors))


def uncast_contraction(operands: Operands, func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator that PyTorch does not cast: only where all of its tensors are half already."""
    if {tensor.dtype for tensor in tensors_in((args, kwargs))} != {operands.half}:
        return NotImplemented
    return contraction(operands, func, *args, **kwargs)


def _run(func: Any, args: Any, kwargs: Any, wide: Sequence[Tensor]) -> Any:
    source = iter(wide)
    return func(*_replaced(args, source), **_replaced(kwargs, source))


def _replaced(value: Any, source: Iterator[Tensor]) -> Any:
    """The same nesting with each tensor, in order, taken from ``source``."""
    if isinstance(value, Tensor):
        return next(source)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, source) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, source) for key, item in value.items()}
    return value
