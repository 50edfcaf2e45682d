"""The package as the tests of its shape see it: its modules, the paths that users may type, its examples.

Knows names and files, and how an example is run. Knows no rule about them.
"""

import doctest
import io
from pathlib import Path

ROOT = Path(__file__).parents[1]


# Below these stand torch's own submodules; a file there is read by type checkers and never run.
ALIASES = ("lucid/nn/", "lucid/optim/")


def modules() -> dict[str, Path]:
    """Every module of the package and its file."""
    files = sorted(ROOT.joinpath("lucid").rglob("*.py"))
    files = [file for file in files if not is_alias(file.relative_to(ROOT).as_posix())]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def is_alias(path: str) -> bool:
    """Whether a file stands for a submodule of torch."""
    return any(path.startswith(alias) and path != f"{alias}__init__.py" for alias in ALIASES)


MODULES = modules()

# What is below the command line is reached by its commands, not by import.
PUBLIC = [
    name
    for name in MODULES
    if not any(part.startswith("_") for part in name.split(".")) and not name.startswith("lucid.amp.cli.")
]

EXAMPLE_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def failures_of(tests: list[doctest.DocTest]) -> str:
    """What doctest reports for some examples; nothing where all give what they say."""
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=EXAMPLE_FLAGS, verbose=False)
    for test in tests:
        runner.run(test, out=report.write, clear_globs=False)
    return report.getvalue()
