"""Why a gradient is not unscaled, in words that name it and the next legal move.

Knows dtypes, names and shapes. Refuses to know values, and raises nothing: it returns what its callers raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NO_FLOAT16 = (
    ValueError,
    "Loss scaling needs float32 parameters. Keep the parameter in float32 (.float()) and let "
    "lucid.amp.autocast choose the half-precision operators",
)
_NO_COMPLEX = (
    NotImplementedError,
    "Complex gradients are not unscaled. Keep the parameter as a real tensor (torch.view_as_real), or step it "
    "with an optimizer of its own, without the scaler",
)
_NO_OTHER = (TypeError, "Only bfloat16, float32 and float64 gradients are unscaled. Convert the parameter")
_NO_LAYOUT = (TypeError, "Values of this layout cannot be divided in place. Make the gradient dense (.to_dense())")
_NO_NEGATIVE_BIT = (
    TypeError,
    "It is a view with the negative bit, stored with the other sign. Give the parameter .resolve_neg() of it",
)
_NO_INFERENCE = (
    RuntimeError,
    "It is an inference tensor, which cannot be changed. Run backward() outside torch.inference_mode(), or set a "
    ".clone() of it",
)
_NO_VALUES = (
    TypeError,
    "It is on the meta device and holds no values. Materialize the model (.to_empty(device=...)) before it is trained",
)
_BY_DTYPE: dict[torch.dtype, tuple[type[Exception], str]] = {
    torch.float16: _NO_FLOAT16,
    torch.complex32: _NO_COMPLEX,
    torch.complex64: _NO_COMPLEX,
    torch.complex128: _NO_COMPLEX,
}


def no_optimizer(given: object) -> TypeError:
    """Return what is raised for what has no ``param_groups`` or no ``step``."""
    return TypeError(
        f"an optimizer, which has param_groups and step, comes first; got an object of type {type(given).__name__}. "
        "Pass the optimizer that was built from the parameters, to clip_grad_norm_(), too. Nothing was changed."
    )


def dtype(optimizer: Any, parameter: Tensor, gradient: Tensor) -> Exception:
    """Return what is raised for a dtype that is not divided."""
    return _refusal(optimizer, parameter, *_BY_DTYPE.get(gradient.dtype, _NO_OTHER))


def inference(optimizer: Any, parameter: Tensor) -> Exception:
    """Return what is raised for an inference tensor."""
    return _refusal(optimizer, parameter, *_NO_INFERENCE)


def without_values(optimizer: Any, parameter: Tensor) -> Exception:
    """Return what is raised for a gradient on the meta device."""
    return _refusal(optimizer, parameter, *_NO_VALUES)


def layout(optimizer: Any, parameter: Tensor) -> Exception:
    """Return what is raised for a layout whose values cannot be divided."""
    return _refusal(optimizer, parameter, *_NO_LAYOUT)


def negative_bit(optimizer: Any, parameter: Tensor) -> Exception:
    """Return what is raised for a view that is stored with the other sign."""
    return _refusal(optimizer, parameter, *_NO_NEGATIVE_BIT)


def overlap(optimizer: Any, *owners: Tensor | None) -> ValueError:
    """Return what is raised for two gradients, or one with itself, that overlap in part; None for another's."""
    first, second = (_described(optimizer, parameter) for parameter in owners)
    what = f"{first} overlaps itself" if first == second else f"{first} and {second} overlap in part"
    return ValueError(
        f"cannot unscale: {what} in memory, so that shared elements would be divided twice. Give the parameter a "
        ".clone() of its gradient. Nothing was changed."
    )


def names(optimizer: Any) -> dict[int, str]:
    """Return the name of each parameter by the parameter's id."""
    found: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or ()
        for index, parameter in enumerate(group["params"]):
            name = given[index] if index < len(given) else f"group {number}, parameter {index}"
            found.setdefault(id(parameter), name)
    return found


def _described(optimizer: Any, parameter: Tensor | None) -> str:
    if parameter is None or parameter.grad is None:
        return "a gradient of another optimizer"
    gradient = parameter.grad
    name = names(optimizer)[id(parameter)]
    shape = "nested" if gradient.is_nested else tuple(gradient.shape)
    return f"the gradient of {name!r} (shape {shape}, {gradient.dtype}, {gradient.layout})"


def _refusal(optimizer: Any, parameter: Tensor, kind: type[Exception], next_move: str) -> Exception:
    what = _described(optimizer, parameter)
    return kind(f"cannot unscale {what} of this {type(optimizer).__name__}. {next_move}. Nothing was changed.")
