"""Which scalers and models a script makes, noticed while it makes and calls them.

Knows the two doors that every script goes through: a scaler is constructed, a module is called. Both are
watched from outside for the time of the run, and are afterwards as they were. Refuses to know what is done with
what was noticed.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lucid.amp import GradScaler


class Notice:
    """A block in which ``on_scaler`` hears of every scaler and ``on_model`` of every model, each once.

    A model is a module with parameters that the script itself calls on its main thread, with gradients: the
    outermost one, and inside ``DistributedDataParallel`` and ``DataParallel`` the module they were given. ``on_model``
    comes before the module's first such call.

    Args:
        on_scaler: called with a scaler as soon as it was constructed, lucid's or PyTorch's.
        on_model: called with a module; None to leave modules alone.
    """

    def __init__(self, on_scaler: Callable[[Any], None], on_model: Callable[[nn.Module], None] | None = None) -> None:
        self.on_scaler, self.on_model = on_scaler, on_model
        self._met: dict[int, weakref.ref[Any]] = {}
        self._undo: list[tuple[Any, str, Any]] = []
        self._inside = False
        self._process = os.getpid()

    def __enter__(self) -> Notice:
        for scaler in (torch.amp.grad_scaler.GradScaler, GradScaler):
            for door in ("__init__", "__setstate__"):
                self._replace(scaler, door, self._noticing_scaler)
        if self.on_model is not None:
            self._replace(nn.Module, "__call__", self._noticing_model)
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    def _replace(self, owner: type, name: str, around: Callable[[Any], Any]) -> None:
        there = vars(owner)[name]
        self._undo.append((owner, name, there))
        setattr(owner, name, around(there))

    def _noticing_scaler(self, construct: Any) -> Any:
        @functools.wraps(construct)
        def constructed(scaler: Any, *args: Any, **kwargs: Any) -> None:
            """Construct it, and tell of it once."""
            construct(scaler, *args, **kwargs)
            if self._is_new(scaler):
                self.on_scaler(scaler)

        return constructed

    def _noticing_model(self, call: Any) -> Any:
        main = threading.main_thread().ident

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Call it, and meet the outermost module of the script's own thread."""
            # What is compiled is traced as it stands, without us in it.
            if self._inside or torch.compiler.is_compiling() or threading.get_ident() != main:
                return call(module, *args, **kwargs)
            self._inside = True
            try:
                self._meet(module)
                return call(module, *args, **kwargs)
            finally:
                self._inside = False

        return called

    def _meet(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled() or not self._is_new(module):
            return
        if os.getpid() != self._process:  # a child that loads data has models of its own
            return
        model = _unwrapped(module)
        # A wrapped model may have been called by itself before.
        known = model is not module and not self._is_new(model)
        if self.on_model is not None and not known and next(model.parameters(), None) is not None:
            self.on_model(model)

    def _is_new(self, thing: Any) -> bool:
        """Whether this very object was not met before; scripts' classes may define ``==`` and forbid ``hash``."""
        met = self._met.get(id(thing))
        if met is not None and met() is thing:
            return False
        self._met[id(thing)] = weakref.ref(thing)
        return True


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers that spread one over devices: they are not to be called alone."""
    while isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        module = module.module
    return module
