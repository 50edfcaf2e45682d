"""Half values below the smallest normal one become zero, as on Metal.

Knows how to do so to what an operator has made, and to every gradient that its backward makes. Refuses to know
which operator it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lucid.amp._half._operands import HALVES, tensors_in

_SEEN = "lucid.amp flushes"
_IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"})


def _largest_subnormal(dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    return limits.smallest_normal * (1 - limits.eps)


_LARGEST = {dtype: _largest_subnormal(dtype) for dtype in HALVES}


def flushed(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with its subnormal elements zero, if it is half."""
    largest = _LARGEST.get(tensor.dtype)
    return tensor if largest is None else functional.hardshrink(tensor, largest)


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, differentiably, and flush; so are the gradients on their way back."""
    made = tensor.to(dtype)
    return made if made is tensor else _settled(made, [tensor], changes=False)


def settle(result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Flush what an operator returned, in place, and the gradients that its backward will make.

    What an operator returned without making it (a view) is left alone.
    """
    given = list(tensors_in((args, kwargs)))
    name = getattr(func, "__name__", "")
    changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    changes = changes or "out" in kwargs or bool(kwargs.get("inplace"))
    for tensor in tensors_in(args[0] if name == "__setitem__" else result):
        _settled(tensor, given, changes)
    return result


def _settled(tensor: Tensor, given: Sequence[Tensor], changes: bool) -> Tensor:
    if tensor.dtype in HALVES and (changes or not _is_view_of_any(tensor, given)):
        # Through .data: not an operation of the graph, and no new version of what backward has saved.
        data = tensor.data
        data.copy_(flushed(data))
    if tensor.grad_fn is not None:
        _watch(tensor.grad_fn, [g.grad_fn for g in given if g is not tensor])
    return tensor


def _is_view_of_any(tensor: Tensor, given: Sequence[Tensor]) -> bool:
    if any(tensor is g for g in given):
        return True
    address = tensor.untyped_storage().data_ptr()
    return any(g.layout is torch.strided and g.untyped_storage().data_ptr() == address for g in given)


def _watch(node: Any, outer: Sequence[Any]) -> None:
    """Hook the nodes from ``node`` to those of the operator's inputs."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or any(node is o for o in outer) or _SEEN in node.metadata or not node.next_functions:
            continue
        node.metadata[_SEEN] = True
        # Before: where the gradients of several uses were added. After: what this node has made.
        node.register_prehook(_flush_all)
        node.register_hook(lambda made, _: _flush_all(made))
        waiting += [following for following, _ in node.next_functions]


def _flush_all(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(g if g is None else flushed(g) for g in gradients)
