"""PyTorch's tensors under the specification's names; the mixed-precision training is in :mod:`lucid.amp`.

Knows which names are its own (``amp``, ``nn``, ``optim``, ``GradScaler``, ``autocast``) and which understand
``"metal"``; every other public name is torch's, by identity. Refuses to change PyTorch before it is asked for
one of them.
"""

from importlib import import_module
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
    torchs = {name for name in dir(_torch) if not name.startswith("_")}
    return sorted(torchs.union(_ROOMS, _OWN))


def __dir__() -> list[str]:
    return sorted({*_public_names(), *(name for name in globals() if name.startswith("__"))})


if TYPE_CHECKING:
    from lucid._names import *  # noqa: F403
else:
    __getattr__ = _look_up
    __all__ = _public_names()
