"""The outputs that a training step scales: a tensor, or any nesting of containers with tensors as leaves.

Knows structures and dtypes. Refuses to know where the scale comes from: it is given one factor a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_MULTIPLIES_IN: dict[torch.dtype, tuple[torch.dtype, torch.dtype]] = {
    torch.float16: (torch.float32, torch.float32),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float32: (torch.float32, torch.float32),
    torch.float64: (torch.float64, torch.float64),
    torch.complex32: (torch.complex64, torch.complex32),
    torch.complex64: (torch.complex64, torch.complex64),
    torch.complex128: (torch.complex128, torch.complex128),
}
"""The dtype of an output → the dtype of the product, and the dtype it is returned in.

2**16 is infinite in float16, so a float16 output comes back as float32; bfloat16 would round the factor.
"""

Factor = Callable[[Tensor], Tensor | None]


def multiplied(outputs: Any, factor: Factor, path: str = "outputs") -> Any:
    """Return the same structure with every tensor multiplied; ``None`` stays, a generator becomes a list.

    Args:
        outputs: a tensor, or any nesting of lists, tuples, namedtuples and mappings (their values).
        factor: returns what a tensor is multiplied by, zero-dimensional, float32, on its device; None for a tensor that
            stays as it is.
        path: how messages name ``outputs``.

    Raises:
        TypeError: a leaf is something else, or an integer or bool tensor.
    """
    if isinstance(outputs, Tensor):
        dtypes = _MULTIPLIES_IN.get(outputs.dtype)
        if dtypes is None:
            raise TypeError(
                f"scale() takes float16, bfloat16, float32, float64 and complex tensors, but {path} is "
                f"{outputs.dtype}. Scale the loss."
            )
        number = factor(outputs)
        if number is None:
            return outputs
        product, returned = dtypes
        if product is outputs.dtype:
            return outputs * number
        return (outputs.to(product) * number).to(returned)
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        return _mapping(outputs, factor, path)
    if isinstance(outputs, (list, tuple, Iterator)):  # a union of types is beyond the compiler of PyTorch 2.6
        items = [multiplied(item, factor, f"{path}[{index}]") for index, item in enumerate(outputs)]
        return _sequence(outputs, items)
    raise TypeError(
        f"scale() takes a tensor, or lists, tuples and dicts of tensors, but {path} is {outputs!r} of type "
        f"{type(outputs).__name__}. Pass the loss as a tensor."
    )


def _sequence(outputs: Any, items: list[Any]) -> Any:
    if isinstance(outputs, Iterator):
        return items
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*items)
    return type(outputs)(items)


def _mapping(outputs: Mapping[Any, Any], factor: Factor, path: str) -> Any:
    items = {key: multiplied(value, factor, f"{path}[{key!r}]") for key, value in outputs.items()}
    if not isinstance(outputs, dict):
        # A copy might share the dict inside, and the user's own tensors would be replaced.
        return type(outputs)(items)  # type: ignore[call-arg]
    if type(outputs) is dict:
        return items
    # A copy keeps what a plain call would lose: a default factory, a dataclass behind the mapping.
    result: Any = copy.copy(outputs)
    for key, value in items.items():
        result[key] = value
    return result
