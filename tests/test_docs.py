"""Every example on a page is run, every command is there, and every link leads somewhere.

Reads README.md, the other pages beside it and docs/. Knows how a page marks a block that needs more than a
processor: a comment ``<!-- needs: cuda -->`` on the line before it.
"""

import contextlib
import doctest
import functools
import io
import itertools
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from package import ROOT, failures_of

from lucid.amp.cli import main

PAGES = {str(page.relative_to(ROOT)): page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}

# What a block may ask for, and whether this machine has it.
NEEDS: dict[str, Callable[[], bool]] = {
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "torchrun": lambda: False,
}

LANGUAGES = {"python", "bash", "text", "json", "diff"}


class Block(NamedTuple):
    """A fenced block of a page: the line on which its code begins, its language, code and need."""

    page: str
    line: int
    language: str
    code: str
    needs: str | None


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = text.splitlines()
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, 1):
        fence = re.match(r"( *)(```+|~~~+)(.*)", line)
        if opened is None and fence:
            opened = number, fence[2], fence[3].strip()
        elif opened and fence and fence[2].startswith(opened[1]) and not fence[3].strip():
            start, _, language = opened
            above = next((above for above in reversed(lines[: start - 1]) if above.strip()), "")
            mark = re.fullmatch(r" *<!-- needs: (.+) -->", above)
            code = textwrap.dedent("\n".join(lines[start : number - 1])) + "\n"
            yield Block(page, start + 1, language, code, mark[1] if mark else None)
            opened = None
    if opened:
        raise ValueError(f"{page}:{opened[0]}: the block is never closed")


BLOCKS = [block for name, page in PAGES.items() for block in blocks_of(page.read_text(), name)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
MARKED = [block for block in PYTHON if block.needs]


def check_blocks(blocks: list[Block], module: ModuleType) -> None:
    """Run blocks one after the other in one module, so that a page reads as one program."""
    for block in blocks:
        if block.code.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.code, vars(module), block.page, block.page, block.line - 1)
            assert failures_of([test]) == ""
        else:
            # The blank lines make a traceback show the page's own line.
            exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), vars(module))


@pytest.fixture
def page_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """An importable module for a page's code, in an empty folder, without a screen."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.manual_seed(0)
    return module


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON if not block.needs}))
def test_a_page_runs(page: str, page_module: ModuleType) -> None:
    """The Python blocks of a page run in order, each seeing what those above it defined."""
    check_blocks([block for block in PYTHON if block.page == page and not block.needs], page_module)


@pytest.mark.parametrize("block", MARKED, ids=lambda block: f"{block.page}:{block.line}")
def test_a_marked_block_is_python_and_runs_where_it_can(block: Block, page_module: ModuleType) -> None:
    """A block that needs a device is always valid Python; it runs where the device is."""
    assert block.needs in NEEDS, f"{block.page}:{block.line}: needs one of {sorted(NEEDS)}"
    compile(block.code, block.page, "exec")
    if not NEEDS[block.needs]():
        pytest.skip(f"needs {block.needs}")
    page = [part for part in PYTHON if part.page == block.page and part.needs in (None, block.needs)]
    check_blocks(page, page_module)


def test_every_block_says_what_language_it_is() -> None:
    """A block without a known language would be passed over in silence."""
    unknown = [f"{b.page}:{b.line}: {b.language!r}" for b in BLOCKS if b.language not in LANGUAGES]
    assert unknown == [], f"known are {sorted(LANGUAGES)}"


def test_blocks_are_found_with_their_line_and_need() -> None:
    """The reader of pages sees language, first line, indentation and mark."""
    text = (
        "# T\n\n```python\na = 1\n```\n\n<!-- needs: cuda -->\n```python\nb = 2\n```\n1. x\n   ```text\n   c\n   ```\n"
    )
    assert list(blocks_of(text, "p.md")) == [
        Block("p.md", 4, "python", "a = 1\n", None),
        Block("p.md", 9, "python", "b = 2\n", "cuda"),
        Block("p.md", 13, "text", "c\n", None),
    ]


def test_a_block_that_fails_is_noticed_at_its_line(page_module: ModuleType) -> None:
    """A broken example fails the page and shows the line of the page."""
    blocks = list(blocks_of("```python\na = 1\n```\n```python\nassert a == 2\n```\n", "p.md"))
    with pytest.raises(AssertionError) as failure:
        check_blocks(blocks, page_module)
    assert failure.traceback[-1].lineno + 1 == 5


def outside_fences(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings, and those written as HTML."""
    anchors: dict[str, int] = {}
    found = set(re.findall(r"""<a (?:id|name)=["']([^"']+)["']""", text))
    for heading in re.findall(r"^#{1,6} +(.*?)[ #]*$", outside_fences(text), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(slug if slug not in anchors else f"{slug}-{anchors[slug]}")
        anchors[slug] = anchors.get(slug, 0) + 1
    return found


def links_of(text: str) -> list[str]:
    """Where a page's links and pictures lead, but for those that leave the repository."""
    prose = re.sub(r"`[^`\n]*`", "", outside_fences(text))
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", prose) + re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose, re.MULTILINE)
    targets += re.findall(r"""(?:src|href)=["']([^"']+)["']""", prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    broken = []
    for target in links_of(page.read_text()):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link names a file that is there, and every anchor a heading of that page."""
    assert broken_links(PAGES[page]) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    """A missing file and a missing heading are reported; headings are spelled as GitHub spells them."""
    page = tmp_path / "a.md"
    page.write_text(
        "# A `b.c` [d](e.md): f\n## Twice\n## Twice\n[1](#a-bc-d-f) [2](#twice-1) [3](https://x.y)\n"
        "![4](no.png) [5](#gone) [6](a.md#twice) `[7](code)`\n"
        "```text\n# not a heading\n[8](block)\n```\n[9](#not-a-heading)\n"
    )
    assert broken_links(page) == ["e.md", "no.png", "#gone", "#not-a-heading"]


def commands_of(text: str) -> list[list[str]]:
    """The commands that a page shows, in its blocks and in its prose, word by word."""
    blocks = [block.code for block in blocks_of(text, "") if block.language == "bash"]
    lines = [line for code in blocks for line in code.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", outside_fences(text))
    return [
        shlex.split(line, comments=True)
        for line in lines
        if line.split(" ")[0] in {"make", "lucid-amp"} or "python " in line
    ]


def unknown_in(words: list[str]) -> list[str]:
    """What a command names that is not there: a target of make, a subcommand or option, a file."""
    files = [word for word in words if re.match(r"(tests|benchmarks|examples)/[\w./]+$", word)]
    unknown = [file for file in files if not (ROOT / file).exists()]
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown += [word for word in words[1:2] if word not in targets]
    if words[0] == "lucid-amp" and len(words) > 1 and words[1].isalpha():
        help_page = help_of(words[1])
        # What follows the script is the script's own.
        ours = itertools.takewhile(lambda word: not word.endswith(".py") and word != "-m", words[2:])
        unknown += [word for word in ours if word.startswith("--") and word.split("=")[0] not in help_page]
        unknown += [] if help_page else [words[1]]
    return unknown


@functools.cache
def help_of(command: str) -> str:
    """The help page of a subcommand; nothing where there is no such command."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return page.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_there(page: str) -> None:
    """Each command on a page names targets, subcommands, options and files that are there."""
    assert [found for words in commands_of(PAGES[page].read_text()) for found in unknown_in(words)] == []


def test_a_command_that_is_not_there_is_noticed() -> None:
    """A wrong target, subcommand, option or file is found; what is the script's own is let through."""
    text = (
        "`make nothing` `lucid-amp fly` `make test`\n```bash\nlucid-amp run --fast --out x train.py --own  # --no\n"
        "python benchmarks/no.py\nOMP_NUM_THREADS=1 python -m pytest tests/test_docs.py\n```\n"
    )
    found = [name for words in commands_of(text) for name in unknown_in(words)]
    assert sorted(found) == ["--fast", "benchmarks/no.py", "fly", "nothing"]
