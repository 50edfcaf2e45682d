"""Functions that PyTorch composes in Python: their bodies run with the mode on.

Knows that such a function first asks whether a mode is there, and hands itself to it as a whole. Refuses to
know what the bodies compute.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.nn import functional

COMPOSITES: frozenset[Callable[..., Any]] = frozenset({functional.multi_head_attention_forward})

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no(*_: Any) -> bool:
    return False


def body(func: types.FunctionType) -> types.FunctionType:
    """The same function, which does not ask: a copy, with PyTorch's own left as it is."""
    names = {**func.__globals__, **dict.fromkeys(_QUESTIONS, _no)}
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
