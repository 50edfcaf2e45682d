"""PyTorch's tensors under the specification's names; the mixed-precision training is in :mod:`lucid.amp`.

Knows which names are its own (``amp``, ``nn``, ``optim``, ``GradScaler``, ``autocast``) and which understand
``"metal"``; every other public name is torch's, by identity. Refuses to change PyTorch before it is asked for
one of them.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch as _torch

from lucid import _metal

__version__ = "0.1.0"

_ROOMS = ("amp", "nn", "optim")
_OWN = {"GradScaler": "lucid.amp", "autocast": "lucid.amp"}


def _look_up(name: str) -> Any:
    """Return ``lucid.<name>``; looking up what understands ``"metal"`` teaches, nothing else does."""
    if name in _ROOMS:
        return import_module(f"lucid.{name}")
    if name in _OWN:
        return getattr(import_module(_OWN[name]), name)
    if name.startswith("_") or not hasattr(_torch, name):
        raise AttributeError(f"module 'lucid' has no attribute {name!r}")
    if name not in _metal.TAUGHT:
        return getattr(_torch, name)
    _metal.teach()
    return _metal.taught(name)


def _public_names() -> list[str]:
    """Torch's public names and our own, but not ``os``, ``sys`` and others that torch happens to import."""
    found = ((name, getattr(_torch, name)) for name in dir(_torch) if not name.startswith("_"))
    torchs = (name for name, it in found if not isinstance(it, ModuleType) or it.__name__.startswith("torch."))
    return sorted({*_ROOMS, *_OWN, *torchs})


def _directory() -> list[str]:
    return sorted({*_public_names(), *(name for name in globals() if name.startswith("__"))})


if TYPE_CHECKING:
    from lucid import amp as amp
    from lucid import nn as nn
    from lucid import optim as optim
    from lucid._names import *  # noqa: F403
    from lucid.amp import GradScaler as GradScaler
    from lucid.amp import autocast as autocast
else:
    __getattr__, __dir__, __all__ = _look_up, _directory, _public_names()
