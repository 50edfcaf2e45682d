"""A package of torch under a name of lucid's: the same objects, the same submodules, nothing copied.

Knows Python's imports. Refuses to know what is inside such a package, and what a device is.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any, NamedTuple


class Alias(NamedTuple):
    """What a package needs, to be another under its own name: its module-level attributes."""

    look_up: Callable[[str], Any]
    directory: Callable[[], list[str]]
    public: list[str]
    path: list[str]


def alias(name: str) -> Alias:
    """Let ``lucid.<package>`` be ``torch.<package>``: its names, and ``import lucid.<package>.<submodule>``."""
    original = import_module(_original(name))

    def look_up(attribute: str) -> Any:
        """Answer for an attribute with torch's; refuse those with an underscore, as ``lucid`` does."""
        if attribute.startswith("_") or not hasattr(original, attribute):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(original, attribute)

    def directory() -> list[str]:
        """List torch's public names and the alias's own attributes."""
        own = (attribute for attribute in vars(sys.modules[name]) if attribute.startswith("__"))
        return sorted({*public, *own})

    public = [attribute for attribute in dir(original) if not attribute.startswith("_")]
    # In front, because what finds files would load torch's a second time, as modules of their own.
    sys.meta_path.insert(0, _Submodules(f"{name}."))
    return Alias(look_up, directory, public, list(original.__path__))


class _Submodules(MetaPathFinder, Loader):
    """Finds the submodules of an alias: they are those of the original."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find what torch has under its own name."""
        if not fullname.startswith(self._prefix):
            return None
        found = find_spec(_original(fullname))
        return found and spec_from_loader(fullname, self, is_package=found.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        """Put torch's module in the place of the one that the import made."""
        # A module may take another's place in sys.modules, and the import then answers with that one.
        sys.modules[module.__name__] = import_module(_original(module.__name__))


def _original(name: str) -> str:
    return "torch" + name.removeprefix("lucid")
