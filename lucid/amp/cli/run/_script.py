"""A training script, run as ``python train.py`` or ``python -m package.module`` would run it.

Knows what the interpreter sets up for a main program (``__main__``, ``sys.argv``, ``sys.path[0]``) and how to let
an exception through as if nobody stood between. Refuses to know what is watched meanwhile.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from lucid.amp.cli import Refusal
from lucid.amp.cli.run._frames import without_ours


@dataclass(frozen=True)
class Script:
    """What to run: a file (or a folder or archive with a ``__main__.py``), or a module found by name.

    Attributes:
        target: path of the file, or name of the module.
        arguments: what the script finds in ``sys.argv[1:]``.
        is_module: whether ``target`` is a module's name.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool

    @classmethod
    def from_words(cls, words: Sequence[str], is_module: bool) -> Script:
        """The script of a command line: its first word, the rest are the script's own.

        Raises:
            Refusal: no script, or no such file.
        """
        words = list(words[1:] if words and words[0] == "--" else words)
        if not words:
            raise Refusal("needs a script: lucid-amp run [options] train.py [the script's arguments]")
        target, *arguments = words
        if not is_module and not os.path.exists(target):
            raise Refusal(f"cannot open {target!r}: there is no such file in {os.getcwd()}")
        return cls(target, tuple(arguments), is_module)

    @property
    def name(self) -> str:
        """A short name to show: the file's without folders, or the module's."""
        return self.target if self.is_module else Path(self.target).name

    def run(self) -> None:
        """Run it as the main program of this process.

        Whatever it raises (``SystemExit`` and ``KeyboardInterrupt`` too) comes out unchanged; should nobody catch
        it, the traceback that the interpreter prints begins in the script, as without us.
        """
        try:
            code, module = self._prepared()
            exec(code, module.__dict__)
        except BaseException as error:
            _print_without_us(error)
            raise

    def _prepared(self) -> tuple[CodeType, ModuleType]:
        """The compiled script and a fresh ``__main__``, in place, with ``sys.argv`` and ``sys.path`` for it."""
        if self.is_module:
            # The module may be found by what the new first entry of the path shows.
            _set_path(os.getcwd())
            sys.argv = ["-m", *self.arguments]
            spec = _spec_of(self.target)
            code, module = _code_of(spec), _main_of_spec(spec)
            file = spec.origin or self.target
        elif (main := _main_inside(os.path.abspath(self.target))) is not None:
            _set_path(os.path.abspath(self.target))
            code, module, file = _code_of(main), _main_of_spec(main), self.target
        else:
            _set_path(os.path.dirname(os.path.realpath(self.target)))
            code, module, file = _compiled(self.target), _main_of_file(self.target), self.target
        sys.argv = [file, *self.arguments]
        sys.modules["__main__"] = module
        return code, module


def _set_path(first: str) -> None:
    """Put ``first`` where the interpreter puts the script's folder; nowhere under ``python -P``."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first


def _compiled(path: str) -> CodeType:
    # The interpreter, too, makes the path absolute before it compiles: tracebacks and warnings show it.
    path = os.path.abspath(path)
    with io.open_code(path) as file:
        # Our own `from __future__` lines are not the script's.
        return compile(file.read(), path, "exec", dont_inherit=True)


def _main_of_file(path: str) -> ModuleType:
    """``__main__`` with the names that the interpreter gives it."""
    module = ModuleType("__main__")
    names: dict[str, Any] = {
        "__builtins__": builtins,
        "__file__": os.path.abspath(path),
        "__loader__": importlib.machinery.SourceFileLoader("__main__", path),
    }
    module.__dict__.update(names)
    return module


def _main_of_spec(spec: importlib.machinery.ModuleSpec) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(__name__="__main__", __builtins__=builtins)
    return module


def _main_inside(path: str) -> importlib.machinery.ModuleSpec | None:
    """The ``__main__`` of a folder or an archive, None for an ordinary file."""
    for hook in sys.path_hooks:
        try:
            finder = hook(path)
        except ImportError:
            continue
        spec = finder.find_spec("__main__")
        if spec is None:
            raise Refusal(f"cannot run {path!r}: there is no __main__.py in it")
        return spec
    return None


def _spec_of(name: str) -> importlib.machinery.ModuleSpec:
    """The module of that name, or a package's ``__main__``; importing its parents, as ``python -m`` does.

    Raises:
        Refusal: there is none, or it is no Python code.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A parent that is missing is the user's word; one that fails to import something is the parent's.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None or spec.loader is None:
        raise Refusal(f"there is no module {name!r} to run, seen from {os.getcwd()}")
    if spec.submodule_search_locations is not None:
        return _spec_of(f"{name}.__main__")
    return spec


def _code_of(spec: importlib.machinery.ModuleSpec) -> CodeType:
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise Refusal(f"cannot run {spec.name!r}: it is no Python code")
    return code  # type: ignore[no-any-return]


def _print_without_us(error: BaseException) -> None:
    """Let the interpreter's last word on ``error`` begin where the script begins."""
    theirs = error.__traceback__
    while theirs is not None and theirs.tb_frame.f_code.co_filename == __file__:
        theirs = theirs.tb_next
    hook = sys.excepthook

    def print_theirs(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Print what is raised as the interpreter does, this error with the script's frames and what it called."""
        if value is error:
            value = without_ours(value, theirs)
            trace = value.__traceback__
        hook(kind, value, trace)

    sys.excepthook = print_theirs
