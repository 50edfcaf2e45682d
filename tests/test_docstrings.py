"""Every public name is described, and every example in a docstring is run.

Reads the sources and the loaded modules. Knows nothing of the pages in docs/.
"""

import ast
import doctest
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from package import MODULES, PUBLIC, failures_of


def docstrings_of(module: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a module with the line of what they describe."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, kinds) and ast.get_docstring(node):
            yield f"{module}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or ""


WITH_EXAMPLES = [name for name, file in MODULES.items() if ">>>" in file.read_text()]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_docstring_examples_run(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ``>>>`` examples of a module's docstrings give what they say."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names, parser = vars(importlib.import_module(module)), doctest.DocTestParser()
    tests = [parser.get_doctest(text, dict(names), where, where, 0) for where, text in docstrings_of(module)]
    assert any(test.examples for test in tests), "the file shows an example outside of every docstring"
    assert failures_of(tests) == ""


def test_docstrings_show_code_only_as_examples_that_run() -> None:
    """No docstring holds Python in a fenced or ``::`` block, which nothing would run."""
    found = [where for module in MODULES for where, text in docstrings_of(module) if shows_code_unrun(text)]
    assert found == []


def shows_code_unrun(docstring: str) -> bool:
    """Whether a docstring has a block of Python that doctest passes over; a map or a formula is none."""
    fenced = re.findall(r"```.*?\n(.*?)```", docstring, flags=re.DOTALL)
    literal = re.findall(r"::[ \t]*\n\s*?\n((?:[ \t]+\S.*\n?|\s*\n)+)", docstring)
    return any(is_python(textwrap.dedent(block)) for block in [*fenced, *literal])


def is_python(text: str) -> bool:
    """Whether a text is a program."""
    try:
        return bool(ast.parse(text).body) and ">>>" not in text
    except SyntaxError:
        return False


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        ("a::\n\n    b = 1\n    c(b)\n\nd", True),
        ("```python\nb\n```", True),
        ("a:\n\n    >>> b", False),
        ("a::\n\n    _b.py   what b is\n    _c.py   what c is\n", False),
        ("a::b", False),
    ],
)
def test_code_that_is_not_run_is_noticed(docstring: str, answer: bool) -> None:
    """Fenced and literal blocks are seen; examples, and what is no Python, are let through."""
    assert shows_code_unrun(docstring) is answer


def described(thing: Any) -> bool:
    """Whether something has a docstring of its own, not the one that ``dataclass`` or ``object`` gives."""
    if inspect.isclass(thing):
        text = vars(thing).get("__doc__") or ""
        return bool(text) and not text.startswith(f"{thing.__name__}(")
    return bool(inspect.getdoc(thing))


def members_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a user can call or read on a class of the package, as the package wrote it."""
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            member = getattr(member, "__func__", member)
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                yield name, member


def undescribed(module: str) -> list[str]:
    """The public names of a module, and their public members, that say nothing of themselves."""
    loaded = importlib.import_module(module)
    own = {name: getattr(loaded, name) for name in loaded.__all__}
    # A function of torch's that was taught something is described by torch.
    own = {name: thing for name, thing in own.items() if is_made_here(thing)}
    rows = [(name, thing) for name, thing in own.items()]
    rows += [(f"{name}.{member}", value) for name, thing in own.items() for member, value in members_of(thing)]
    return [f"{module}.{name}" for name, thing in rows if not described(thing)]


def is_made_here(thing: Any) -> bool:
    """Whether the package made something, or only hands it on."""
    return getattr(thing, "__module__", "").startswith("lucid") and not hasattr(thing, "__wrapped__")


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_described(module: str) -> None:
    """Every public name that the package makes has a docstring, its public methods too."""
    assert undescribed(module) == []
    assert described(importlib.import_module(module))


def test_a_missing_docstring_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class, method or property without a docstring is reported by name."""
    module = ModuleType("lucid_bare")
    source = "class A:\n 'Described.'\n def f(self): ...\n @property\n def p(self): ...\nclass B: ...\n"
    exec(source, vars(module))
    vars(module)["__all__"] = ["A", "B"]
    monkeypatch.setitem(sys.modules, "lucid_bare", module)
    assert undescribed("lucid_bare") == ["lucid_bare.B", "lucid_bare.A.f", "lucid_bare.A.p"]


def test_a_wrong_answer_in_a_docstring_is_noticed() -> None:
    """An example whose output differs from the text is reported, an equal one is not."""
    right, wrong = (doctest.DocTestParser().get_doctest(f">>> 1 + 1\n{answer}\n", {}, "e", "e", 0) for answer in (2, 3))
    assert failures_of([right]) == ""
    assert "Expected:\n    3\nGot:\n    2" in failures_of([wrong])
