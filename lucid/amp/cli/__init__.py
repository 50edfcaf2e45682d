"""The command line: ``lucid-amp COMMAND``, also ``python -m lucid.amp COMMAND``.

Knows the table of commands, how one line tells a user what is wrong, and which other distributions
claim the package's name. Refuses to know what a command does: each is a module beside this one
with ``add_arguments(parser)`` and ``run(args) -> int``, imported only when its name is typed.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

__all__ = ["COMMANDS", "PROGRAM", "RIVALS", "Refusal", "main", "require", "rival_installed"]

PROGRAM = "lucid-amp"

COMMANDS = {
    "demo": "train a real network in float16, without and with the scaler, and see why it matters",
    "run": "run a training script unchanged, and tell what float16 did in it",
    "report": "draw the report of a run again",
}

RIVALS = ("lucid", "lucid-dl")
"""Distributions on PyPI that install a package called ``lucid``, too."""


class Refusal(Exception):
    """What a command will not start with; its text is the one line that the user reads."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        """Print one line to standard error and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help tells what there is)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the words after ``lucid-amp``; those of the process where None.

    Returns:
        The command's own status; 2 for what it refuses to start with.

    Raises:
        SystemExit: as argparse does, after ``--help``, ``--version`` and a wrong argument.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if (line := rival_installed()) is not None:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    parser, command = _parser_for(words)
    args = parser.parse_args(words)
    if command is None:
        parser.print_help()
        return 0
    try:
        return int(command.run(args))
    except Refusal as refusal:
        print(f"{PROGRAM} {args.command}: {refusal}", file=sys.stderr)
        return 2


def require(packages: Mapping[str, str], extra: str) -> None:
    """Refuse, before any work, where a package that comes with an extra is missing.

    Args:
        packages: import name → name on PyPI.
        extra: the extra of this distribution that brings them.

    Raises:
        Refusal: names what is missing and the command that installs it.
    """
    missing = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Refusal(
            f"needs {_listed(missing)}, not installed here: pip install '{PROGRAM}[{extra}]' "
            f"(in a checkout: pip install '.[{extra}]')"
        )


def rival_installed() -> str | None:
    """One line about another distribution that owns a package called ``lucid``, or None."""
    for name in RIVALS:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _owns_lucid(found):
            return (
                f"the distribution {name} {found.version} is installed beside this one and owns a package of "
                f"the same name, lucid; keep one: pip uninstall {name}, then pip install --force-reinstall "
                f"--no-deps {PROGRAM}"
            )
    return None


def _owns_lucid(found: importlib.metadata.Distribution) -> bool:
    names = (found.read_text("top_level.txt") or "").split()
    # top_level.txt is setuptools' habit; other builders leave only the list of files.
    names += [file.parts[0] for file in found.files or () if len(file.parts) > 1]
    return "lucid" in names


def _parser_for(words: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    parser = _Parser(prog=PROGRAM, description="Mixed-precision training for PyTorch, at the command line.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    chosen = next((word for word in words if not word.startswith("-")), None)
    command: ModuleType | None = None
    for name, summary in COMMANDS.items():
        place = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        # Only the command that was typed is imported: the others' extras may be missing.
        if name == chosen:
            command = importlib.import_module(f"{__name__}.{name}")
            command.add_arguments(place)
    return parser, command


def _version() -> str:
    import torch

    import lucid

    return f"{PROGRAM} {lucid.__version__} (torch {torch.__version__}, Python {platform.python_version()})"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
