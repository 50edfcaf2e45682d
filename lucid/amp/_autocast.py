"""The scope in which PyTorch chooses half precision: a ``torch.autocast`` that knows "metal".

Knows how to enter one instance again (nested, or in two threads) and how to keep a coroutine's or a
generator's scope to its own body. Refuses to know which operators run in half precision (those lists are
PyTorch's) and how the arithmetic is done (that is ``_half``'s).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch

from lucid.amp import _torch

try:
    from lucid.amp import _half
except ImportError:  # right without it, only slower on a processor without half-precision units
    _half = None  # type: ignore[assignment]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Entered(threading.local):
    """The scopes this thread is in, innermost last: the instance, its own state, whether ``_half`` is on."""

    def __init__(self) -> None:
        self.scopes: list[tuple[autocast, torch.autocast, bool]] = []


_entered = _Entered()

_ARITHMETIC = ("auto", "native", "float32")


@_torch.constant_when_traced
def _device_type(spec: str | torch.device) -> str:
    """What PyTorch calls the device that ``spec`` names; asked late, since "metal" may warn."""
    from lucid._metal import device_type

    return device_type(spec)


class autocast(torch.autocast):
    """Run the operators that stand it in half precision, the weights staying float32.

    A ``torch.autocast``, and a context manager and decorator as that is. A decorated coroutine, generator
    or async generator has the scope only while its own body runs: it is left at every suspension.

    Args:
        device_type: Where the operators run: "metal" for this machine's accelerator, or any device that
            PyTorch names, as a string or a ``torch.device``.
        dtype: float16 or bfloat16; ``None`` is PyTorch's choice for the device.
        enabled: ``False`` makes a scope in which every operator keeps its inputs' dtype.
        cache_enabled: Whether a weight is cast once a scope; ``None`` keeps what is in force.
        arithmetic: How the processor multiplies half-precision matrices: "native" as PyTorch does;
            "float32" in float32, the result rounded once; "auto" as whichever this processor does sooner,
            measured once. On a GPU it is always native.
        flush_subnormals: Make half-precision subnormals zero wherever a half-precision value is made,
            forward and backward, as Metal does.

    Raises:
        RuntimeError: PyTorch has no autocast on that device.
        ValueError: ``arithmetic`` is none of the three.
    """

    def __new__(
        cls,
        device_type: str | torch.device = "metal",
        dtype: torch.dtype | None = torch.float16,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        arithmetic: str = "auto",
        flush_subnormals: bool = False,
    ) -> Any:
        """Make an instance; in a function that is being compiled, of the class that the compiler knows."""
        if torch.compiler.is_compiling():
            _check_arithmetic(arithmetic)
            return torch.autocast(_device_type(device_type), dtype, enabled, cache_enabled)
        return super().__new__(cls)

    def __init__(
        self,
        device_type: str | torch.device = "metal",
        dtype: torch.dtype | None = torch.float16,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        arithmetic: str = "auto",
        flush_subnormals: bool = False,
    ) -> None:
        if callable(device_type):
            raise TypeError(f"autocast takes a device first, not {device_type!r}. Decorate with @autocast() instead.")
        super().__init__(_device_type(device_type), dtype, enabled, cache_enabled)
        _check_arithmetic(arithmetic)
        if flush_subnormals and _half is None:
            raise RuntimeError("flush_subnormals=True needs lucid.amp._half, which is missing: reinstall lucid-amp")
        self._half_settings = (arithmetic, flush_subnormals)

    @property
    def arithmetic(self) -> str:
        """What was picked: "native", "float32", or "mixed" where it depends on the kind of operator."""
        picked = set(self.arithmetic_by_kind.values()) or {"native"}
        return picked.pop() if len(picked) == 1 else "mixed"

    @property
    def arithmetic_by_kind(self) -> dict[str, str]:
        """What was picked for each kind of operator; empty where all is PyTorch's, as on a GPU."""
        if _half is None or self.device != "cpu":
            return {}
        return _half.Settings(*self._half_settings).picked(self.fast_dtype)

    @staticmethod
    def is_autocast_enabled(device_type: str | torch.device | None = None) -> bool:
        """Whether operators are being cast now, on the innermost scope's device unless one is named."""
        return torch.is_autocast_enabled(_named(device_type))

    @staticmethod
    def get_autocast_dtype(device_type: str | torch.device | None = None) -> torch.dtype:
        """The dtype that operators are cast to, on the innermost scope's device unless one is named."""
        return torch.get_autocast_dtype(_named(device_type))

    @staticmethod
    def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` for a part of a model in such a scope.

        It makes the recomputation as quick as the first computation where the arithmetic is float32. Without
        it such a part is computed natively, both times: right, only slower. It needs ``use_reentrant=False``.

        Returns:
            The contexts of the first computation and of the recomputation.
        """
        if _half is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        return _half.checkpoint_contexts()

    def __enter__(self) -> autocast:
        """Enter; an instance may be entered again before it is left."""
        _leave_frame_uncompiled()
        # What was in force before lives in a copy of its own: PyTorch keeps it on the instance, where
        # a second entry would overwrite it.
        scope = object.__new__(torch.autocast)
        scope.__dict__.update(self.__dict__)
        scope.__enter__()  # type: ignore[no-untyped-call]
        _entered.scopes.append((self, scope, self._enter_half()))
        return self

    def _enter_half(self) -> bool:
        """Turn the arithmetic on where it can matter, and say whether that was so; what is exported is native."""
        if _half is None or torch.compiler.is_compiling() or not torch.is_autocast_enabled(self.device):
            return False
        settings = _half.Settings(*self._half_settings)
        is_native = self.device != "cpu" or set(settings.picked(self.fast_dtype).values()) == {"native"}
        # Inside another scope of the processor even "native" must be said.
        if is_native and not settings.flush_subnormals and not (self.device == "cpu" and _half.is_on()):
            return False
        _half.enter(settings)
        return True

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool | None:
        """Restore exactly what was in force before the matching entry; never swallows an exception."""
        _leave_frame_uncompiled()
        scopes = _entered.scopes
        for place in reversed(range(len(scopes))):
            if scopes[place][0] is self:
                _, scope, half_is_on = scopes.pop(place)
                if half_is_on and _half is not None:
                    _half.leave()
                return cast("bool | None", scope.__exit__(exc_type, exc_val, exc_tb))
        raise RuntimeError("autocast was left in a thread that had not entered it: enter it there first")

    def __call__(self, func: _Function) -> _Function:
        """Decorate ``func``: its body runs in this scope.

        Raises:
            TypeError: ``func`` is not callable.
        """
        if not callable(func):
            raise TypeError(f"autocast(...) decorates a callable, such as a function or a module; got {func!r}")
        for is_kind, decorate in _DECORATORS:
            if is_kind(func):
                return cast("_Function", functools.wraps(func)(decorate(self, func)))
        return cast("_Function", super().__call__(func))  # type: ignore[no-untyped-call]


def _check_arithmetic(arithmetic: str) -> None:
    if arithmetic not in _ARITHMETIC:
        raise ValueError(f"arithmetic is {arithmetic!r}: choose one of {', '.join(map(repr, _ARITHMETIC))}")


def _leave_frame_uncompiled() -> None:
    """Let the compiler run a scope's own method as it is: in it, it takes the instance for one of PyTorch's class."""
    if torch.compiler.is_dynamo_compiling():
        _torch.frame_skipper()()


def _named(device_type: str | torch.device | None) -> str:
    if device_type is not None:
        return _device_type(device_type)
    if torch.compiler.is_compiling() or not _entered.scopes:
        return _device_type("metal")
    return str(_entered.scopes[-1][0].device)


def _stepwise(scope: autocast, body: Any) -> Generator[Any, Any, Any]:
    """Drive ``body`` (anything with ``send``, ``throw`` and ``close``) with the scope around each step."""
    resume: Callable[[], Any] = functools.partial(body.send, None)
    while True:
        try:
            with scope:
                value = resume()
        except StopIteration as stop:
            return stop.value
        try:
            resume = functools.partial(body.send, (yield value))
        except GeneratorExit:
            with scope:
                body.close()
            raise
        except BaseException as error:
            resume = functools.partial(body.throw, error)


@types.coroutine
def _awaiting(scope: autocast, body: Any) -> Generator[Any, Any, Any]:
    return (yield from _stepwise(scope, body))


def _for_generators(scope: autocast, func: Callable[..., Any]) -> Callable[..., Any]:
    def decorated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        """Yield what the generator yields, with the scope in each of its steps."""
        return (yield from _stepwise(scope, func(*args, **kwargs)))

    return decorated


def _for_coroutines(scope: autocast, func: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    async def decorated(*args: Any, **kwargs: Any) -> Any:
        """Await the coroutine, with the scope while it runs."""
        return await _awaiting(scope, func(*args, **kwargs))

    return decorated


def _for_async_generators(scope: autocast, func: Callable[..., Any]) -> Callable[..., Any]:
    async def decorated(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        """Yield what the asynchronous generator yields, with the scope while it runs."""
        body = func(*args, **kwargs)
        step = body.asend(None)
        while True:
            try:
                value = await _awaiting(scope, step)
            except StopAsyncIteration:
                return
            try:
                step = body.asend((yield value))
            except GeneratorExit:
                await _awaiting(scope, body.aclose())
                raise
            except BaseException as error:
                step = body.athrow(error)

    return decorated


_DECORATORS: tuple[tuple[Callable[[Any], bool], Callable[[autocast, Any], Callable[..., Any]]], ...] = (
    (inspect.isasyncgenfunction, _for_async_generators),
    (inspect.iscoroutinefunction, _for_coroutines),
    (inspect.isgeneratorfunction, _for_generators),
)
