"""The mode that a scope turns on: it sees every operator and replaces the heavy ones.

Knows which operator is whose (one table), and that the autocast state in force, not the scope that was
entered, says what happens. Refuses to know formulas.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lucid.amp import _torch
from lucid.amp._half import _attention, _contractions, _convolutions, _processor, _products, _recurrence, _subnormals
from lucid.amp._half._composites import COMPOSITES, body
from lucid.amp._half._operands import CASTABLE, HALVES, Operands, Weights, convert, replaced

Handler = Callable[..., Any]


@dataclass(frozen=True)
class Settings:
    """What one ``autocast`` asks for.

    Attributes:
        arithmetic: "auto", "native" or "float32".
        flush_subnormals: whether half subnormals become zero.
    """

    arithmetic: str
    flush_subnormals: bool

    def picked(self, dtype: torch.dtype) -> dict[str, str]:
        """For each kind of operator "native" or "float32", on the processor, in ``dtype``."""
        if dtype not in HALVES:
            return dict.fromkeys(_processor.KINDS, "native")
        if self.arithmetic == "auto":
            return _processor.faster(dtype)
        return dict.fromkeys(_processor.KINDS, self.arithmetic)


class _Row:
    """An operator's handler, its kind, and which calls the handler understands."""

    def __init__(self, kind: str, handler: Handler) -> None:
        parameters = list(inspect.signature(handler).parameters.values())[2:]
        self.kind = kind
        self.handler = handler
        self.names = frozenset(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)
        self.any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.least = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)

    def understands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call is one the handler was written for; any other is PyTorch's."""
        if "out" in kwargs or not (self.any_name or self.names.issuperset(kwargs)):
            return False
        return self.any_number or (len(args) <= self.most and len(args) + len(kwargs) >= self.least)


def _rows(kind: str, handler: Handler, functions: Iterable[Callable[..., Any]]) -> dict[Any, _Row]:
    return dict.fromkeys(functions, _Row(kind, handler))


_TABLE: dict[Any, _Row] = {
    **_rows("product", _products.linear, [functional.linear]),
    **_rows("product", _products.matmul, [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul]),
    **_rows("product", _products.exact_matmul, [torch.mm, Tensor.mm, torch.bmm, Tensor.bmm]),
    **_rows("product", _products.uncast_matmul, [torch.mv, Tensor.mv, torch.dot, Tensor.dot]),
    **_rows(
        "product",
        _products.add_product,
        [torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addbmm, Tensor.addbmm],
    ),
    **_rows(
        "product",
        _contractions.contraction,
        [torch.einsum, torch.tensordot, torch.inner, Tensor.inner, torch.chain_matmul, torch.linalg.multi_dot],
    ),
    **_rows("product", _contractions.uncast_contraction, [torch.addmv, Tensor.addmv, functional.bilinear]),
    **_rows(
        "convolution",
        _convolutions.convolution,
        [functional.conv1d, functional.conv2d, functional.conv3d],
    ),
    **_rows(
        "convolution",
        _convolutions.transposed_convolution,
        [functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d],
    ),
    **_rows("attention", _attention.attention, [functional.scaled_dot_product_attention]),
    **_rows("recurrence", _recurrence.recurrence, [torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu]),
}


# All of whose floating operands PyTorch casts.
_CASTS_ALL = (
    _products.linear,
    _products.matmul,
    _products.exact_matmul,
    _products.add_product,
    _contractions.contraction,
    _convolutions.convolution,
    _convolutions.transposed_convolution,
    _attention.attention,
)


class _Thread(threading.local):
    """This thread's scopes, and what they share."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.mode = _Mode()
        self.weights = Weights()
        self.checkpoint: object = None


class _Mode(TorchFunctionMode):
    """Sees each operator of its thread; pushed by the outermost scope only."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the operator in the arithmetic that is in force, or hand it to PyTorch."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in COMPOSITES:
            with self:
                return body(func)(*args, **kwargs)
        settings = thread.settings[-1]
        if settings.flush_subnormals:
            args, kwargs = _flushed(func, args, kwargs)
            return _subnormals.settle(_replaced(settings, func, args, kwargs), func, args, kwargs)
        row = _TABLE.get(func)
        if row is None:
            return func(*args, **kwargs)
        return _replaced(settings, func, args, kwargs)


thread = _Thread()


def _replaced(settings: Settings, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    row = _TABLE.get(func)
    result = NotImplemented
    if row is not None and torch.is_autocast_enabled("cpu") and row.understands(args, kwargs):
        half = torch.get_autocast_dtype("cpu")
        if settings.picked(half)[row.kind] == "float32" and not _is_pytorchs():
            cast = _subnormals.convert if settings.flush_subnormals else convert
            result = row.handler(Operands(half, thread.weights, cast), func, *args, **kwargs)
    return func(*args, **kwargs) if result is NotImplemented else result


def _flushed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with what autocast would cast, unseen, already cast and flushed; on any device."""
    row = _TABLE.get(func)
    if row is None or row.handler not in _CASTS_ALL:
        return args, kwargs

    def cast(tensor: Tensor) -> Tensor:
        """Return what autocast would hand to the operator."""
        kind = tensor.device.type
        if tensor.dtype not in CASTABLE or not torch.is_autocast_enabled(kind):
            return tensor
        half = torch.get_autocast_dtype(kind)
        return Operands(half, thread.weights, _subnormals.convert).cast(tensor)

    given: tuple[tuple[Any, ...], dict[str, Any]] = replaced((args, kwargs), cast)
    return given


def _is_pytorchs() -> bool:
    """Whether a replaced operator could not be differentiated, or not recomputed, as PyTorch means to."""
    if _torch.function_transforms_are_active():
        return True
    # A checkpoint that will be recomputed without this mode must be computed without it too.
    checkpoint = _torch.checkpoint()
    return checkpoint is not None and checkpoint is not thread.checkpoint


def is_on() -> bool:
    """Whether this thread is in a scope whose settings are in force here."""
    return bool(thread.settings)


def enter(settings: Settings) -> None:
    """Put the settings in force in this thread."""
    thread.settings.append(settings)
    if len(thread.settings) == 1:
        thread.mode.__enter__()  # type: ignore[no-untyped-call]


def leave() -> None:
    """Return to the settings before; with the outermost scope the mode and the weights' copies go."""
    thread.settings.pop()
    if not thread.settings:
        thread.weights.clear()
        thread.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
