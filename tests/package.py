"""The package as the tests of its shape see it: its modules, the paths that users may type, its examples.

Knows names and files, and how an example is run. Knows no rule about them.
"""

import doctest
import io
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """Every module of the package and its file."""
    files = sorted(ROOT.joinpath("lucid").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


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
