"""Who may import whom, what is public, and what an import leaves as it was.

Reads the sources with ``ast`` and runs ``import lucid.amp`` in processes of its own. Every rule is shown
twice: that the library keeps it, and that a small offence against it would be noticed. Knows nothing of what
the files compute.
"""

import ast
import enum
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from package import MODULES, PUBLIC, ROOT

PURE = ("lucid.amp._schedule", "lucid.amp._stages", "lucid.amp._alarm", "lucid.amp._journal", "lucid.amp._ballots")

# A room is a module, or a folder with all that is in it. Each row: what else of the package it may import.
TENSORS: dict[str, tuple[str, ...]] = {
    "lucid.amp._torch": (),
    "lucid.amp._memory": (),
    "lucid.amp._seen": ("lucid.amp._memory",),
    "lucid.amp._refusals": (),
    "lucid.amp._outputs": (),
    "lucid.amp._half": ("lucid.amp._torch",),
    "lucid.amp._division": ("lucid.amp._torch",),
    "lucid.amp._norms": ("lucid.amp._torch", "lucid.amp._memory", "lucid.amp._division"),
    "lucid.amp._gradients": (
        "lucid.amp._torch",
        "lucid.amp._memory",
        "lucid.amp._seen",
        "lucid.amp._refusals",
        "lucid.amp._division",
    ),
    "lucid.amp._reading": ("lucid.amp._torch", "lucid.amp._division", "lucid.amp._norms"),
    "lucid.amp._fused": (
        "lucid.amp._torch",
        "lucid.amp._memory",
        "lucid.amp._division",
        "lucid.amp._gradients",
        "lucid.amp._reading",
    ),
    "lucid.amp._clip": (
        "lucid.amp._torch",
        "lucid.amp._memory",
        "lucid.amp._division",
        "lucid.amp._norms",
        "lucid.amp._gradients",
    ),
    "lucid.amp._clip_together": (
        "lucid.amp._torch",
        "lucid.amp._division",
        "lucid.amp._norms",
        "lucid.amp._gradients",
        "lucid.amp._clip",
        "lucid.amp._shares",
        "lucid.amp._unread",
        "lucid.amp._consensus",
    ),
    "lucid.amp._unscaling": (
        "lucid.amp._torch",
        "lucid.amp._stages",
        "lucid.amp._seen",
        "lucid.amp._division",
        "lucid.amp._gradients",
        "lucid.amp._reading",
        "lucid.amp._fused",
        "lucid.amp._clip",
        "lucid.amp._clip_together",
        "lucid.amp._unread",
        "lucid.amp._consensus",
    ),
    "lucid.amp._causes": ("lucid.amp._torch", "lucid.amp._gradients"),
    "lucid.amp._meshes": ("lucid.amp._torch",),
    "lucid.amp._shares": ("lucid.amp._meshes", "lucid.amp._division"),
    "lucid.amp._unread": ("lucid.amp._norms",),
    "lucid.amp._rounds": ("lucid.amp._meshes", "lucid.amp._unread"),
    "lucid.amp._consensus": (
        "lucid.amp._meshes",
        "lucid.amp._ballots",
        "lucid.amp._norms",
        "lucid.amp._unread",
        "lucid.amp._rounds",
    ),
}
# What the scaler is made of besides its story.
PARTS: dict[str, tuple[str, ...]] = {
    "lucid.amp._settings": ("lucid.amp._schedule", "lucid.amp._division", "lucid.amp._consensus"),
    "lucid.amp._events": (
        "lucid._warning",
        "lucid.amp._schedule",
        "lucid.amp._stages",
        "lucid.amp._alarm",
        "lucid.amp._gradients",
        "lucid.amp._causes",
    ),
}
STORY = ("lucid.amp._grad_scaler", "lucid.amp._autocast")
INSIDE = (*PURE, *TENSORS, *PARTS, *STORY, "lucid.amp", "lucid._metal", "lucid._warning")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "lucid": ("lucid._metal", "lucid._names", "lucid.amp", "lucid.nn", "lucid.optim"),
    "lucid._warning": (),
    "lucid._metal": ("lucid._warning",),
    "lucid._alias": (),
    "lucid.nn": ("lucid._metal", "lucid._alias"),
    "lucid.optim": ("lucid._metal", "lucid._alias"),
    "lucid.amp": (*STORY, "lucid.amp._schedule"),
    "lucid.amp._schedule": (),
    "lucid.amp._stages": (),
    "lucid.amp._alarm": ("lucid.amp._schedule",),
    "lucid.amp._journal": ("lucid._warning",),
    "lucid.amp._ballots": (),
    **TENSORS,
    **PARTS,
    "lucid.amp._grad_scaler": (*PURE, *TENSORS, *PARTS),
    "lucid.amp._autocast": ("lucid.amp._torch", "lucid.amp._half", "lucid._metal"),
    "lucid.amp.diagnosis": INSIDE,
    "lucid.amp.history": (*INSIDE, "lucid.amp.diagnosis"),
    "lucid.amp.cli": (*INSIDE, "lucid.amp.diagnosis", "lucid.amp.history", "lucid"),
    "lucid.amp.__main__": ("lucid.amp.cli",),
}

# What comes with an extra, and who may use it.
EXTRAS = {"numpy", "rich", "matplotlib", "sklearn"}
LEAVES = ("lucid.amp.diagnosis", "lucid.amp.history", "lucid.amp.cli")

# Underscore names that their owners document: named tuples', and Python's own.
DOCUMENTED = {"_fields", "_replace", "_asdict", "_make", "_exit", "_getframe"}


PACKAGES = {name for name, file in MODULES.items() if file.name == "__init__.py"}


class When(enum.Enum):
    """When an import statement runs."""

    AT_IMPORT = "when the file is imported"
    IN_A_CALL = "when a function of the file is called"
    NEVER = "for type checkers alone"


class Import(NamedTuple):
    """One imported module: where it stands, and when it is loaded."""

    line: int
    target: str
    when: When


def room_of(module: str) -> str | None:
    """The row of the table that a module falls under; None for one that has no place yet."""
    while module and module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    # Only a folder's row covers what is below it: a new file beside GradScaler needs a row of its own.
    return module if module not in ("", "lucid", "lucid.amp") else None


def imports_of(tree: ast.AST, module: str, when: When = When.AT_IMPORT) -> Iterator[Import]:
    """Every import statement in a module, and every ``import_module`` of a name written out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, module)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield Import(node.lineno, inner if inner in MODULES else source, when)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (Import(node.lineno, name.value, when) for name in node.args[:1] if is_text(name))
        for below, then in parts_of(node, when):
            yield from imports_of(below, module, then)


def absolute(node: ast.ImportFrom, module: str) -> str:
    """The module that a ``from … import`` names, with the leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def is_text(node: ast.AST) -> bool:
    """Whether an expression is a string written out."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def parts_of(node: ast.AST, when: When) -> Iterator[tuple[ast.AST, When]]:
    """What stands below a statement, and when that runs."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        yield ast.Module(node.body, []), When.NEVER
        yield ast.Module(node.orelse, []), when
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield node, When.IN_A_CALL
    else:
        yield node, when


def offences(source: str, module: str) -> list[str]:
    """What a module imports although the table does not let it, one line each."""
    room = module if module in MAY_IMPORT else room_of(module)
    if room is None:
        return [f"{module}: has no row in MAY_IMPORT; say what it may import"]
    found = []
    for line, target, when in imports_of(ast.parse(source), module):
        complaint = complaint_about(room, target, when)
        if complaint:
            found.append(f"{module}:{line} imports {target}: {complaint}")
    return found


def complaint_about(room: str, target: str, when: When) -> str | None:
    """Why a room may not import a module; None where it may."""
    top = target.partition(".")[0]
    if top == "lucid":
        there = target if target in MAY_IMPORT else room_of(target) or target
        return None if there in (room, *MAY_IMPORT[room]) else f"{room} may import {MAY_IMPORT[room]}"
    if top in sys.stdlib_module_names:
        return None
    if top == "torch":
        return f"{room} is pure: the standard library only" if room in PURE else None
    if (top in EXTRAS and room in LEAVES) or (top == "typing_extensions" and when is When.NEVER):
        return None
    return "neither torch nor the standard library"


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module: str) -> None:
    """A module imports only what its row of the table allows."""
    assert offences(MODULES[module].read_text(), module) == []


def test_every_row_of_the_table_has_a_module() -> None:
    """The table speaks of nothing that is not there."""
    assert [room for room in MAY_IMPORT if room not in MODULES] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lucid.amp._schedule", "import torch"),
        ("lucid.amp._schedule", "def f():\n    from lucid.amp import _gradients"),
        ("lucid.amp._stages", "from . import _schedule"),
        ("lucid.amp._gradients", "from lucid.amp._clip import norm"),
        ("lucid.amp._gradients", "from ..amp import _consensus"),
        ("lucid.amp._gradients", "import numpy"),
        ("lucid.amp._grad_scaler", "import lucid.amp.diagnosis"),
        ("lucid.amp._grad_scaler", "from lucid.amp.history import History"),
        ("lucid.amp._grad_scaler", "import importlib\nimportlib.import_module('lucid.amp.cli')"),
        ("lucid.amp._autocast", "import lucid.nn"),
        ("lucid.amp", "from lucid.amp.cli import main"),
        ("lucid.amp.diagnosis", "def f():\n    import lucid.amp.cli.run"),
        ("lucid.amp.diagnosis._events", "from lucid.amp import history"),
        ("lucid.amp.cli", "def f():\n    import pandas"),
        ("lucid.amp.cli", "import typing_extensions"),
        ("lucid.amp._new", ""),
    ],
)
def test_an_import_against_the_table_is_noticed(module: str, source: str) -> None:
    """Each kind of forbidden import is found, also in a function, relative, or by name."""
    assert len(offences(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lucid.amp._clip", "import torch, math\nfrom lucid.amp._gradients import Gradient"),
        ("lucid.amp.history", "def plot():\n    import matplotlib.pyplot"),
        ("lucid.amp.history", "if TYPE_CHECKING:\n    from matplotlib.figure import Figure"),
        ("lucid.amp.cli.demo", "from . import main\nfrom lucid.amp import GradScaler, diagnosis"),
    ],
)
def test_an_import_that_the_table_allows_is_let_through(module: str, source: str) -> None:
    """Allowed imports are not reported."""
    assert offences(source, module) == []


def loads(module: str, sources: dict[str, str]) -> set[str]:
    """Whose modules an import of ``module`` loads, itself or through others of the package."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in sources:
            found = imports_of(ast.parse(sources[name]), name)
            waiting += [part.target for part in found if part.when is When.AT_IMPORT]
        waiting += [name.rpartition(".")[0]] if "." in name else []
    return {name.partition(".")[0] for name in seen}


# The subcommands' own modules are loaded to print a help page.
COMMANDS = [name for name in MODULES if name.startswith("lucid.amp.cli.") and name.count(".") == 3]


@pytest.mark.parametrize("module", [*PUBLIC, *COMMANDS])
def test_an_import_loads_no_extra(module: str) -> None:
    """What comes with an extra is loaded by the functions that need it, never by an import."""
    sources = {name: file.read_text() for name, file in MODULES.items()}
    assert loads(module, sources) & EXTRAS == set()


def test_an_extra_that_is_loaded_is_noticed() -> None:
    """An extra is found through a class body, a parent package and another module, not in a function."""
    sources = {
        "a": "import b",
        "b": "class B:\n    from c.d import e",
        "c": "if TYPE_CHECKING:\n    import numpy\nelse:\n    import matplotlib.pyplot\ndef f():\n    import rich",
    }
    assert loads("a", sources) & EXTRAS == {"matplotlib"}


def own_private_names(trees: list[ast.Module]) -> set[str]:
    """Every name with one leading underscore that the package defines itself."""
    names = {part for module in MODULES for part in module.split(".")}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return {name for name in names if is_private(name)}


def is_own(node: ast.expr) -> bool:
    """Whether an expression is the object or class whose method this is."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    """Whether a name has one leading underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def foreign_private_names(tree: ast.Module, own: set[str]) -> list[str]:
    """Each place that says a private name which the package did not define, so that it is somebody else's."""
    said = [
        (line, name)
        for node in ast.walk(tree)
        for line, names in names_said_by(node)
        for name in names
        if is_private(name) and name not in own and name not in DOCUMENTED
    ]
    return [f"line {line}: {name}" for line, name in said]


def names_said_by(node: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """The names by which a node reaches into something: attributes, imports, and strings that do the same."""
    if isinstance(node, ast.Attribute):
        yield node.lineno, [node.attr]
    elif isinstance(node, ast.Import):
        yield node.lineno, [part for alias in node.names for part in alias.name.split(".")]
    elif isinstance(node, ast.ImportFrom):
        yield node.lineno, [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = node.value.split(".")
        # Words of prose and keys of a state dict are not reached for by attribute.
        if all(part.isidentifier() for part in parts) and not node.value.startswith("_growth_tracker"):
            yield node.lineno, parts


def test_private_names_of_torch_stand_in_one_file() -> None:
    """Underscore names that are not the package's own are said in ``lucid/amp/_torch.py`` alone."""
    trees = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}
    own = own_private_names([tree for name, tree in trees.items() if name != "lucid.amp._torch"])
    own |= {stub.stem for stub in ROOT.glob("lucid/*.pyi")}
    found = {name: foreign_private_names(tree, own) for name, tree in trees.items()}
    assert found.pop("lucid.amp._torch"), "the one file that may say them says none: is it read at all?"
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch._foreach_mul_(gradients, 2)",
        "from torch._utils import _flatten_dense_tensors",
        "import torch._dynamo",
        "import torch.utils._pytree as tree",
        "getattr(optimizer, '_step_supports_amp_scaling', False)",
        "gradient._local_tensor",
        "import_module('torch._C._distributed')",
    ],
)
def test_a_private_name_of_torch_is_noticed(source: str) -> None:
    """A private name is found as attribute, import and string."""
    assert foreign_private_names(ast.parse(source), own={"_own"})


def test_the_own_private_names_are_let_through() -> None:
    """What the package defines itself is not taken for torch's."""
    tree = ast.parse("class A:\n    def _own(self):\n        self._count = self._own()._count")
    assert foreign_private_names(tree, own_private_names([tree])) == []


def defined_in(tree: ast.Module) -> set[str]:
    """The public functions and classes that a module defines at its top."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


@pytest.mark.parametrize("module", PUBLIC)
def test_all_names_what_a_module_offers(module: str) -> None:
    """``__all__`` of a public module: no name twice, each of them there, no public definition left out."""
    loaded = importlib.import_module(module)
    listed = list(loaded.__all__)
    assert len(listed) == len(set(listed))
    assert [name for name in listed if not hasattr(loaded, name)] == []
    assert defined_in(ast.parse(MODULES[module].read_text())) - set(listed) == set()
    assert set(listed) <= set(dir(loaded))


def test_the_map_names_every_file() -> None:
    """The docstring of ``lucid.amp`` tells of each file and folder beside it, and of no other."""
    told = re.findall(r"^    (\w+(?:\.py|/)) ", importlib.import_module("lucid.amp").__doc__ or "", re.MULTILINE)
    rooms = {name.split(".")[2] for name in MODULES if name.startswith("lucid.amp.")} - {"__main__"}
    there = {room + ("/" if f"lucid.amp.{room}" in PACKAGES else ".py") for room in rooms}
    assert sorted(told) == sorted(there)


def test_the_public_names_are_those_that_were_promised() -> None:
    """``lucid.amp`` offers three names."""
    assert sorted(importlib.import_module("lucid.amp").__all__) == ["GradScaler", "ScaleUpdate", "autocast"]


def test_public_classes_show_their_public_path() -> None:
    """A user sees ``lucid.amp.GradScaler`` in an error, a pickle or a help page, not a private file."""
    amp = importlib.import_module("lucid.amp")
    assert {name: getattr(amp, name).__module__ for name in amp.__all__} == dict.fromkeys(amp.__all__, "lucid.amp")


# Prints what a statement loads beside torch, and what it changes in torch's own classes and modules.
PROBE = """
import json, sys
import torch, torch.nn, torch.optim

def state():
    places = (torch, torch.Tensor, torch.amp, torch.autocast, torch.autograd, torch.overrides,
              torch.nn, torch.nn.Module, torch.nn.Parameter, torch.optim, torch.optim.Optimizer)
    return {{f"{{place.__name__}}.{{name}}": value for place in places
            for name, value in vars(place).items()}}

old, loaded = state(), set(sys.modules)
{statement}
new = state()
# A submodule of torch that is imported for the first time appears in its parent: that is no change.
changed = {{name for name in old | new if old.get(name) is not new.get(name)}} - set(sys.modules)
tops = {{name.partition(".")[0] for name in set(sys.modules) - loaded}} - set(sys.stdlib_module_names)
print(json.dumps({{"changed": sorted(changed), "loaded": sorted(tops - {{"torch"}})}}))
"""


def probe(statement: str, path: Path = ROOT) -> dict[str, list[str]]:
    """What one statement loads and changes in a process that has imported torch."""
    command = [sys.executable, "-W", "error", "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_only_lucid_and_changes_nothing_in_torch() -> None:
    """``import lucid.amp`` loads no plotting, no trainer, nothing but itself; ``Tensor.to`` stays."""
    assert probe("import lucid.amp") == {"changed": [], "loaded": ["lucid"]}


def test_a_heavy_import_or_a_change_in_torch_would_be_noticed(tmp_path: Path) -> None:
    """The probe sees a trainer that is loaded, a method that is replaced, added or removed."""
    (tmp_path / "lightning.py").write_text("")
    offence = "import lightning; torch.Tensor.to = print; torch.nn.Module.metal = print; del torch.optim.SGD"
    assert probe(offence, tmp_path) == {
        "changed": ["Module.metal", "Tensor.to", "torch.optim.SGD"],
        "loaded": ["lightning"],
    }


def test_the_probe_sees_what_lucid_itself_teaches() -> None:
    """Importing ``lucid.nn`` teaches ``to`` the word "metal", on purpose; nothing else changes."""
    assert probe("import lucid.nn")["changed"] == ["Module.to", "Tensor.to"]
