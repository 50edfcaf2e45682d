"""The tensors inside whatever a module takes and returns.

Knows lists, tuples, namedtuples, mappings and dataclasses. Refuses to know what the tensors are for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside, in order. What is of another kind holds none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, tuples and dicts with ``change(tensor)`` in each tensor's place; the rest as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [with_tensors(item, change) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items) if type(value) in (list, tuple) else value
    return value
