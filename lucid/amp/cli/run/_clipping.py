"""Calls of PyTorch's clipping functions, heard wherever a script has them from.

Knows the functions, and how to stand in for them in every module that has one by name, for the time of the run;
afterwards no module holds a stand-in. Refuses to know whether a call was right.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

BOUNDS = {"clip_grad_norm_": "max_norm", "clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}
"""The functions of ``torch.nn.utils`` that make gradients smaller, and what each calls its bound."""


class Call(NamedTuple):
    """One call that has returned.

    Attributes:
        name: of the function.
        bound: what it was given as ``max_norm`` or ``clip_value``.
        parameters: whose gradients it was given.
        norm: of all of them before; None where the function needs none.
    """

    name: str
    bound: float
    parameters: list[Tensor]
    norm: Tensor | None


class Clipping:
    """A block in which ``on_call`` hears of every call; a call inside another one is not heard by itself.

    Args:
        on_call: called with each call, after it has done its work.
        wanted: asked before; where it says no, a call costs nothing else.
    """

    def __init__(self, on_call: Callable[[Call], None], wanted: Callable[[], bool]) -> None:
        self.on_call, self._wanted = on_call, wanted
        self._inside = self._ended = False
        found = {name: getattr(torch.nn.utils, name, None) for name in BOUNDS}  # the oldest PyTorch lacks one
        self._theirs = {name: function for name, function in found.items() if function is not None}
        self._ours = {name: self._hearing(name, function) for name, function in self._theirs.items()}

    def __enter__(self) -> Clipping:
        _replace(self._theirs, self._ours)
        return self

    def __exit__(self, *exception: object) -> None:
        # Also in modules that the script imported, and that have the stand-in by name; elsewhere it does nothing more.
        self._ended = True
        _replace(self._ours, self._theirs)

    def _hearing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clip(*args: Any, **kwargs: Any) -> Any:
            """Clip, and tell of it."""
            # What is compiled is traced as it stands, without us in it.
            if torch.compiler.is_compiling() or self._inside or self._ended or not self._wanted():
                return function(*args, **kwargs)
            given = args[0] if args else kwargs.get("parameters", ())
            seen: list[Tensor] = []
            if isinstance(given, Iterator):
                given = _passed_on(given, seen) if isinstance(given, GeneratorType) else list(given)
                args, kwargs = ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "parameters": given})
            self._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            bound = args[1] if len(args) > 1 else kwargs[BOUNDS[name]]
            parameters = seen or ([given] if isinstance(given, Tensor) else list(given))
            norm = result if name != "clip_grads_with_norm_" else args[2] if len(args) > 2 else kwargs["total_norm"]
            self.on_call(Call(name, float(bound), parameters, norm))
            return result

        return clip


def _passed_on(parameters: Iterable[Tensor], seen: list[Tensor]) -> Iterator[Tensor]:
    """A generator still, for a function that warns of empty ones."""
    for parameter in parameters:
        seen.append(parameter)
        yield parameter


def _replace(old: dict[str, Callable[..., Any]], new: dict[str, Callable[..., Any]]) -> None:
    """Put each new function where a module has the old one, by whatever name."""
    there = {id(function): new[name] for name, function in old.items()}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in there:
                    setattr(module, name, there[id(value)])
