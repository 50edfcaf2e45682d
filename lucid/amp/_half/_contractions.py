"""Operators that PyTorch itself makes of products: einsum, tensordot, inner and others.

Knows that any such operator may be run on float32 copies. Refuses to know the formulas: these are run once more to be
differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lucid.amp._half._operands import Operands, are_plain, replaced, tensors_in
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
    args, kwargs = replaced((args, kwargs), lambda _: next(source))
    return func(*args, **kwargs)
