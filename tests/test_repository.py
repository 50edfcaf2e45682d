"""What no file of the repository holds: loose ends, and places on somebody's machine.

Reads every file that git tracks. Knows nothing of what is in them otherwise.
"""

import re
import subprocess
from pathlib import Path

import pytest
from package import ROOT

# Put together from parts, so that this file does not hold them itself.
NOTE = "TO" + "DO"
HOME = "/" + "home/me"
LOOSE_ENDS = re.compile("|".join([NOTE, "FIX" + "ME", "X" * 3, "<" * 7, ">" * 7]))
PLACES = re.compile(r"(?<![\w.])/" + r"(tmp|home|root|Users|work)/\w")
LARGE = 1 << 20


def tracked() -> list[Path]:
    """The files of the repository."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout: git lists no files here")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def lines_with(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    """Where a pattern stands in the text files among these."""
    found = []
    for file in files:
        content = file.read_bytes()
        if b"\0" not in content:
            lines = enumerate(content.decode().splitlines(), 1)
            found += [f"{file.name}:{number}: {line.strip()}" for number, line in lines if pattern.search(line)]
    return found


@pytest.mark.parametrize("pattern", [LOOSE_ENDS, PLACES], ids=["loose ends", "places"])
def test_no_file_holds_it(pattern: re.Pattern[str]) -> None:
    """No note to oneself, no mark of a merge, and no path of one machine is left in a file."""
    assert lines_with(pattern, tracked()) == []


def test_no_file_is_large() -> None:
    """Pictures and data stay below a mebibyte, so that a clone stays small."""
    assert [file.name for file in tracked() if file.stat().st_size > LARGE] == []


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    """A note and a path are found with their line; a picture is not read, an address is no path."""
    text = tmp_path / "a.py"
    text.write_text(f"x = 1  # {NOTE}\nopen('{HOME}/x')\nurl = 'https://a.b/home/x'\n")
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\0" + NOTE.encode())
    assert lines_with(LOOSE_ENDS, [text, picture]) == [f"a.py:1: x = 1  # {NOTE}"]
    assert lines_with(PLACES, [text, picture]) == [f"a.py:2: open('{HOME}/x')"]
