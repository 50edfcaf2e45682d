"""docs/troubleshooting.md holds every message that the package raises or warns, in its own words.

Reads the source and the page. A message whose words change, and a new one, fail here until the page knows them.
"""

import ast
import re
from collections.abc import Iterator

import pytest
from package import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
SAID_BY = re.compile(r"(Error|Refusal|\bwarn)$")
HOLE = "\0"
"""What stands in a message where its numbers and names will be."""


def template(node: ast.expr) -> str | None:
    """The words of a string or f-string, holes for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{template(node.left) or HOLE}{template(node.right) or HOLE}"
    return None


def messages_in(source: str) -> Iterator[tuple[int, str]]:
    """The line and the words of each message that is raised, warned or kept beside its class of error."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=said, args=[what, *_]) | ast.Tuple(elts=[said, what]):
                words = template(what)
            case _:
                continue
        # A KeyError tells a key, not a message.
        if words is not None and (name := ast.unparse(said)) != "KeyError" and SAID_BY.search(name):
            yield node.lineno, words


def rows_of(page: str) -> Iterator[tuple[str, list[str]]]:
    """Each row of a table whose first column is "message": the first cell, and its code spans."""
    inside = False
    for line in page.splitlines():
        cell = line.removeprefix("|").partition(" | ")[0].strip()
        inside = line.startswith("|") and (inside or cell == "message")
        if inside and cell not in ("message", "---") and not cell.startswith("---"):
            yield cell, re.findall(r"`([^`]+)`", cell)


def matches(fragment: str, words: str) -> bool:
    """Whether a message has the words of a fragment, in which ``…`` stands for anything."""
    pattern = ".*".join(re.escape(part.strip()) for part in fragment.split("…"))
    return re.search(pattern, words, re.DOTALL) is not None


SOURCES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "lucid").rglob("*.py"))}
MESSAGES = [
    (f"{name}:{line}", words) for name, path in SOURCES.items() for line, words in messages_in(path.read_text())
]
FRAGMENTS = [fragment for _, spans in rows_of(PAGE.read_text()) for fragment in spans]


@pytest.mark.parametrize("words", [pytest.param(words, id=place) for place, words in MESSAGES])
def test_every_message_is_on_the_page(words: str) -> None:
    """Whoever searches the page for a message finds its cause and what to do."""
    assert any(matches(fragment, words) for fragment in FRAGMENTS), words


def test_every_fragment_is_a_message_still() -> None:
    """The page explains nothing that the package no longer says."""
    strings = [
        words
        for path in SOURCES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr) and (words := template(node)) is not None
    ]
    assert [fragment for fragment in FRAGMENTS if not any(matches(fragment, words) for words in strings)] == []


def test_every_row_quotes_a_message() -> None:
    """A row without a message in code marks could never be found, nor checked."""
    assert [cell for cell, spans in rows_of(PAGE.read_text()) if not spans] == []


def test_messages_and_rows_are_found() -> None:
    """Raised, warned and tabled messages are seen with holes; a fragment matches in order only."""
    source = (
        'raise ValueError(f"bad {x!r}, " "use {y}")\nwarnings.warn("old " + name)\nT = (TypeError, "no")\n'
        'raise KeyError("k")\nprint("ValueError")\n'
    )
    assert list(messages_in(source)) == [(1, f"bad {HOLE}, use {{y}}"), (2, f"old {HOLE}"), (3, "no")]
    table = "| message | cause |\n|---|---|\n| `a …` or `b` | c |\n\n| other | `x` |\n|---|---|\n| `d` | e |\n"
    assert list(rows_of(table)) == [("`a …` or `b`", ["a …", "b"])]
    assert matches("bad …, use", f"bad {HOLE}, use it")
    assert not matches("use … bad", f"bad {HOLE}, use it")
