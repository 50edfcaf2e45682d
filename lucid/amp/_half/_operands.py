"""What an operator is given: which arguments are cast to half precision, and what is cast once a scope.

Knows PyTorch's rule (floating tensors of the processor but float64 are cast, and a float32 weight only once
a scope) and which tensors it must leave to PyTorch. Refuses to know any operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lucid.amp import _torch

HALVES = (torch.float16, torch.bfloat16)
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
CASTABLE = frozenset({torch.float32, *HALVES})
Convert = Callable[[Tensor, torch.dtype], Tensor]


class Weights:
    """The half copies of float32 weights, each cast once until the outermost scope is left.

    A weight that was changed in place since is cast again.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype, bool, Convert], tuple[Tensor, int | None, Tensor]] = {}

    def cast(self, weight: Tensor, half: torch.dtype, convert: Convert) -> Tensor:
        """Return the copy of ``weight`` in ``half``, made by ``convert`` where there is none yet."""
        key = (id(weight), half, torch.is_grad_enabled(), convert)
        version = _torch.version(weight)
        held = self._copies.get(key)
        if version is None:
            return convert(weight, half)
        if held is None or version is None or held[1] != version:
            # The weight is held too, so that no other tensor takes its id.
            self._copies[key] = held = (weight, version, convert(weight, half))
        return held[2]

    def clear(self) -> None:
        """Forget every copy."""
        self._copies.clear()


class Operands:
    """How one operator's arguments become half precision in the scope that is in force.

    Args:
        half: float16 or bfloat16.
        weights: the scope's copies.
        convert: casts a tensor, differentiably.
    """

    __slots__ = ("convert", "half", "weights")

    def __init__(self, half: torch.dtype, weights: Weights, convert: Convert) -> None:
        self.half = half
        self.weights = weights
        self.convert = convert

    def cast(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in half precision; a float32 weight's copy is kept for the scope."""
        if tensor.dtype is self.half:
            return tensor
        if _is_weight(tensor) and torch.is_autocast_cache_enabled():
            return self.weights.cast(tensor, self.half, self.convert)
        return self.convert(tensor, self.half)

    def cast_optional(self, tensor: Tensor | None) -> Tensor | None:
        """Return ``tensor`` in half precision, or ``None`` for ``None``."""
        return None if tensor is None else self.cast(tensor)


def _is_weight(tensor: Tensor) -> bool:
    # PyTorch's own condition. An inference tensor has no version to tell a change by.
    return (
        tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not torch.is_inference_mode_enabled()
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments: in lists, tuples and mappings' values, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def replaced(value: Any, replacement: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with each tensor, in order, replaced."""
    if isinstance(value, Tensor):
        return replacement(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(item, replacement) for item in value)
    if isinstance(value, dict):
        return {key: replaced(item, replacement) for key, item in value.items()}
    return value


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether all are ordinary floating tensors of the processor that PyTorch would cast.

    Subclasses, sparse, nested and float64 tensors are PyTorch's to handle or to refuse.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN or tensor.dtype not in CASTABLE:
            return False
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
            return False
    return True


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, differentiably: the gradient is cast back."""
    return tensor.to(dtype)
