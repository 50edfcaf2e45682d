"""``lucid-amp report FOLDER``: the report of a run, drawn from what the run wrote down.

Knows which files a report is made of and how it is summed up in a terminal. Refuses to know what they say:
``_findings`` judges, ``_build`` arranges, ``_page`` writes HTML.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from pathlib import Path

from lucid.amp.cli import Refusal, require
from lucid.amp.cli.report._content import Content

EXTRAS = {"matplotlib": "matplotlib"}
MOST_USEFUL = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder."""
    parser.add_argument("folder", metavar="FOLDER", help="what lucid-amp run left, or is still writing")


def run(args: argparse.Namespace) -> int:
    """Draw the report of a folder again, and sum it up.

    Raises:
        Refusal: there is no run in the folder, it cannot be written, or an extra is missing.
    """
    check()
    folder = Path(args.folder)
    try:
        content = draw(folder)
    except OSError as error:
        raise Refusal(f"cannot write the report into {args.folder!r}: {error.strerror or error}") from None
    sum_up(content, folder)
    return 0


def check() -> None:
    """Refuse where what draws is missing.

    Raises:
        Refusal: names the extra to install.
    """
    require(EXTRAS, "demo")


def draw(folder: Path) -> Content:
    """Make ``scale.png``, ``ranges.png`` and ``report.html`` of a folder anew, from the lines that are in it.

    Raises:
        Refusal: there is no run in it.
        OSError: it cannot be written.
    """
    from lucid.amp.cli.report._build import content_of
    from lucid.amp.cli.report._page import page
    from lucid.amp.cli.report._run import read

    content = content_of(read(folder))
    for name, png in content.pictures.items():
        (folder / name).write_bytes(png)
    (folder / "report.html").write_text(page(content), "utf-8")
    return content


def sum_up(content: Content, folder: Path, more: str = "") -> None:
    """Print the verdict, the most useful findings and what is to be told besides to standard error.

    That is not the script's output.
    """
    lines = ["", f"lucid-amp: {content.title}: {content.verdict}"]
    for finding in content.findings[:MOST_USEFUL]:
        lines += ["", f"  {finding.title}"]
        lines += _wrapped(finding.facts)
        if finding.advice:
            lines += _wrapped([f"→ {finding.advice}"])
    if more:
        lines += ["", *_wrapped([more], "  ")]
    lines += ["", f"  {folder / 'report.html'}"]
    say("\n".join(lines))


def say(text: str) -> None:
    """Print to standard error, where there is one; what its encoding lacks is replaced."""
    if sys.stderr is not None:
        encoding = sys.stderr.encoding or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it was closed
            print(text.encode(encoding, "replace").decode(encoding), file=sys.stderr)


def _wrapped(sentences: tuple[str, ...] | list[str], indent: str = "    ") -> list[str]:
    text = " ".join(sentences).replace("`", "")
    return textwrap.wrap(
        text, 96, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
