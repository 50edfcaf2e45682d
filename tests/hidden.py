"""A torch without private names, for one module of the package alone.

Knows how to run ``lucid/amp/_torch.py`` so that every underscore name of torch is missing there, while torch
itself keeps them all. Knows none of those names.
"""

import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "lucid.amp._torch"


def is_private(name: str) -> bool:
    """Whether a name, or a part of a dotted one, has one leading underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


class PublicModule(ModuleType):
    """A module of torch, and the modules in it, without their private names."""

    def __init__(self, real: ModuleType) -> None:
        # Under its own name, ``from torch import _utils`` would find torch._utils in sys.modules.
        super().__init__(f"public {real.__name__}")
        self.__dict__["real"] = real

    def __getattr__(self, name: str) -> Any:
        return without_private(self.__dict__["real"], name)


def without_private(thing: Any, name: str, *default: Any) -> Any:
    """``getattr`` for which private names are not there, in what it returns neither."""
    if is_private(name):
        if default:
            return default[0]
        raise AttributeError(f"{name} is hidden, as it may be missing in another release")
    found = getattr(thing, name, *default)
    return PublicModule(found) if is_torch(found) else found


def is_torch(thing: object) -> bool:
    """Whether something is torch or a module in it."""
    return isinstance(thing, ModuleType) and thing.__name__.partition(".")[0] == "torch"


def public_import(name: str, *scope: Any) -> Any:
    """``__import__`` that hands out torch without its private names."""
    module = __import__(name, *scope)
    if not is_torch(module):
        return module
    if is_private(name):
        raise ImportError(f"{name} is hidden, as it may be missing in another release")
    return PublicModule(module)


PUBLIC_BUILTINS = vars(builtins) | {
    "getattr": without_private,
    "hasattr": lambda thing, name: not is_private(name) and hasattr(thing, name),
    "__import__": public_import,
}


class PublicLoader(importlib.machinery.SourceFileLoader):
    """Runs a module's source with builtins that see no private name."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module."""
        vars(module)["__builtins__"] = PUBLIC_BUILTINS
        exec(self.get_code(module.__name__), vars(module))


class Hide(importlib.abc.MetaPathFinder):
    """Lets the one module be loaded so; every other is left to the finders that come next."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module where Python finds it, and change only what runs it."""
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin:
            spec.loader = PublicLoader(name, spec.origin)
        return spec


def hide() -> None:
    """Hide the private names from now on; too late once the module was imported."""
    if MODULE in sys.modules:
        raise RuntimeError(f"{MODULE} was imported already; its names cannot be hidden any more")
    sys.meta_path.insert(0, Hide())
