"""mypy and pyright, in their strictest modes, see under lucid's names what they see under torch's.

Each checker runs once, on three programs: ``typed_names.py``, which it must accept; one with a mistake a line, which
it must find; and one that touches every public name of ``lucid`` and of each submodule, beside its twin for ``torch``.
"""

import importlib
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import warnings
from collections import defaultdict

import pytest
import torch

import lucid

HERE = pathlib.Path(__file__).parent
CHECKOUT = pathlib.Path(lucid.__file__).parent.parent if (HERE.parent / "lucid").is_dir() else None

MISTAKES = """
import lucid
import lucid.nn as nn
import lucid.optim as optim
import torch
lucid.nothing  # a name that torch lacks
nn.Nothing
optim.Nothing
nn.functional.nothing
import lucid.nn.nothing
from lucid.nn.utils import clip_nothing
from lucid.optim.lr_scheduler import NothingLR
number: int = lucid.randn(2)
device: str = lucid.device("metal")
module: torch.optim.Optimizer = nn.Linear(1, 1)
nn.Linear("wide", 1)
optim.SGD(None, lr=0.1)
lucid.GradScaler("cuda")
lucid.load(map_location="metal")
"""
FIRST_MISTAKE = MISTAKES.splitlines().index("lucid.nothing  # a name that torch lacks") + 1

Lines = dict[str, set[int]]
"""The lines of each program, by its name, in which a checker found something."""


def every_name() -> str:
    """A program that touches each public name of ``lucid`` and of the submodules of its rooms, one a line."""
    modules = {"lucid": dir(lucid)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for room in (torch.nn, torch.optim):
            walk = pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
            for name in (room.__name__, *(found.name for found in walk)):
                if "._" not in name:
                    modules[name.replace("torch", "lucid", 1)] = dir(importlib.import_module(name))
    imports = [f"import {name} as m{number}" for number, name in enumerate(modules)]
    names = ((number, name) for number, all_ in enumerate(modules.values()) for name in all_)
    return "\n".join([*imports, *(f"m{number}.{name}" for number, name in names if name[0] != "_")]) + "\n"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the programs, and what pyright needs to find ``lucid``."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "accepted.py").write_text((HERE / "typed_names.py").read_text())
    (folder / "mistakes.py").write_text(MISTAKES)
    ours = every_name()
    (folder / "all_lucid.py").write_text(ours)
    (folder / "all_torch.py").write_text(ours.replace("import lucid", "import torch"))
    settings = {"include": ["."], "typeCheckingMode": "strict", "reportUnusedExpression": False}
    # Lists of names are touched, not used; their types are PyTorch's affair.
    settings |= {"reportUnknownMemberType": False, "reportDeprecated": False, "reportUnusedImport": False}
    if CHECKOUT:
        settings["extraPaths"] = [str(CHECKOUT)]
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def by_mypy(programs: pathlib.Path) -> Lines:
    """Where mypy --strict finds errors."""
    pytest.importorskip("mypy", reason="mypy is not installed (it is in the extra dev)")
    environment = os.environ | ({"MYPYPATH": str(CHECKOUT)} if CHECKOUT else {})
    cache = CHECKOUT / ".mypy_cache" if CHECKOUT else programs / "cache"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(cache)]
    files = sorted(path.name for path in programs.glob("*.py"))
    done = subprocess.run([*command, *files], cwd=programs, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr or "the mistakes were not found"
    found = defaultdict(set)
    for name, line in re.findall(r"^(\w+)\.py:(\d+): error", done.stdout, re.MULTILINE):
        found[name].add(int(line))
    return found


@pytest.fixture(scope="module")
def by_pyright(programs: pathlib.Path) -> Lines:
    """Where pyright finds errors or warnings."""
    pytest.importorskip("pyright", reason="pyright is not installed (it is in the extra dev)")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", str(programs)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr or "the mistakes were not found"
    found = defaultdict(set)
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        found[pathlib.Path(one["file"]).stem].add(one["range"]["start"]["line"] + 1)
    return found


@pytest.fixture(params=["by_mypy", "by_pyright"])
def found(request: pytest.FixtureRequest) -> Lines:
    """What one of the checkers finds."""
    return request.getfixturevalue(request.param)


def test_a_users_program_is_accepted(found: Lines) -> None:
    """The specification's names have torch's types, in strict mode."""
    assert found["accepted"] == set()


def test_mistakes_are_found(found: Lines) -> None:
    """Nothing is hidden behind Any: a wrong name, type or argument is an error, in each line."""
    lines = range(FIRST_MISTAKE, len(MISTAKES.splitlines()) + 1)
    assert found["mistakes"] == set(lines)


def test_every_name_that_torch_shows_is_seen(programs: pathlib.Path, by_mypy: Lines, found: Lines) -> None:
    """Each public name that the checkers see in torch, or in a submodule of a room, they see under lucid's name."""
    lines = (programs / "all_lucid.py").read_text().splitlines()
    shown = {number for number, _ in enumerate(lines, 1)} - by_mypy["all_torch"] - found["all_torch"]
    hidden = shown & found["all_lucid"]
    assert [lines[number - 1] for number in sorted(hidden)] == []
    assert len(shown) > 2000
