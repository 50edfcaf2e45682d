"""A file of JSON lines that a kill at any byte leaves readable, and that can be gone on with."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lucid.amp import _journal
from lucid.amp._journal import Journal, read_lines

FACTS = [{"scale": 65536.0, "skipped": [False]}, {"scale": 32768.0, "where": ["a weight, with ünïcode"]}, {}]


def written(path: Path) -> bytes:
    """A journal of three lines, and its bytes."""
    journal = Journal(path)
    for step, facts in enumerate(FACTS):
        journal.append(step, facts)
    journal.close()
    return path.read_bytes()


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    """Every line comes back as it was given, its step first."""
    written(tmp_path / "deep" / "j.jsonl")
    expected = [{"step": step, **facts} for step, facts in enumerate(FACTS)]
    assert read_lines(tmp_path / "deep" / "j.jsonl") == expected


def test_cut_at_every_byte_the_whole_lines_are_read_and_no_other(tmp_path: Path) -> None:
    """Whatever byte a kill comes at, reading gives exactly the lines that were whole by then."""
    path = tmp_path / "j.jsonl"
    whole = written(path)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        # A line is whole once its closing brace is there, with or without the line's end.
        expected = [json.loads(line) for line in whole[:length].split(b"\n") if line.endswith(b"}")]
        assert read_lines(path) == expected, length


def test_cut_at_every_byte_the_journal_goes_on(tmp_path: Path) -> None:
    """Whatever byte a kill comes at, the next process adds its line behind the whole ones."""
    path = tmp_path / "j.jsonl"
    whole = written(path)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        before = read_lines(path)
        journal = Journal(path)
        journal.append(99, {"new": True})
        journal.close()
        assert read_lines(path) == [*before, {"step": 99, "new": True}], length


def test_a_torn_line_longer_than_one_read_is_cut_off(tmp_path: Path) -> None:
    """The end of the last whole line is found however far back it lies."""
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"step":0}\n{"step":1,"where":"' + b"x" * 200_000)
    Journal(path).append(1, {})
    assert path.read_bytes() == b'{"step":0}\n{"step":1}\n'


# The file by its path: it is pure Python, and a process that need not load torch starts at once.
ALONE = """
import os, runpy, sys
journal = runpy.run_path(sys.argv[1])["Journal"](sys.argv[2])
"""

FOR_EVER = """
for step in range(10**9):
    journal.append(step, {"filler": "x" * 100})
"""

FORKING = """
journal.append(1, {})
child = os.fork()
journal.append(2 if child else 3, {})
if child:
    os.waitpid(child, 0)
"""


def command(program: str, path: Path) -> list[str]:
    """A process that runs ``program`` with a ``journal`` at ``path``."""
    return [sys.executable, "-c", ALONE + program, _journal.__file__, str(path)]


@pytest.mark.alone
def test_a_killed_writer_leaves_a_journal(tmp_path: Path) -> None:
    """A process killed in the middle of writing leaves consecutive lines from the first on."""
    path = tmp_path / "j.jsonl"
    writer = subprocess.Popen(command(FOR_EVER, path))
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 20_000):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    steps = [line["step"] for line in read_lines(path)]
    assert len(steps) > 100
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("content", [b"import torch\n", b'{"a": 1}\n', b'{\n "step": 1\n}\n', b"[1, 2]", b"\x89PNG"])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    """A path that holds something else is refused by name, for reading and writing, and keeps its bytes."""
    path = tmp_path / "train.py"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.py is no history.*Nothing was changed"):
        Journal(path)
    with pytest.raises(ValueError, match="is no history"):
        read_lines(path)
    assert path.read_bytes() == content


def test_a_line_lost_to_a_broken_disk_is_left_out_and_counted(tmp_path: Path) -> None:
    """A line inside the file that is no JSON is left out with a warning; the others are read."""
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"step":0}\n\0\0\0\0\n{"step":2}\n')
    with pytest.warns(UserWarning, match="1 of 3 lines cannot be read"):
        assert [line["step"] for line in read_lines(path)] == [0, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_full_disk_is_warned_of_once_and_ends_nothing(tmp_path: Path) -> None:
    """A disk without room costs the lines and one warning, never the training."""
    os.symlink("/dev/full", tmp_path / "j.jsonl")
    journal = Journal(tmp_path / "new.jsonl")
    journal.path = tmp_path / "j.jsonl"
    with pytest.warns(UserWarning, match="cannot be written any more"):
        journal.append(0, {})
    journal.append(1, {})  # a second warning would be an error here
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """A data-loading child that inherits the journal does not write into its parent's file."""
    path = tmp_path / "j.jsonl"
    subprocess.run(command(FORKING, path), check=True)
    assert [line["step"] for line in read_lines(path)] == [1, 2]
