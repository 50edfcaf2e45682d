"""The example that trains a small GPT on two ranks, run as a user runs it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import lucid

pytestmark = pytest.mark.alone

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_fsdp2.py"


def torchrun(*arguments: str, cwd: pathlib.Path) -> list[tuple[int, float, float, float]]:
    """What two ranks of the example print: step, loss, norm and scale."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = os.environ | {"PYTHONPATH": str(pathlib.Path(lucid.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLE), *arguments], cwd=cwd, env=found, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"step +(\d+) +loss ([\d.]+) +norm ([\d.]+|inf|nan) +scale ([\d.e+]+)", done.stdout)
    return [(int(step), float(loss), float(norm), float(scale)) for step, loss, norm, scale in rows]


def test_it_learns_and_resumes_where_it_stopped(tmp_path: pathlib.Path) -> None:
    """30 steps, then 42: the second run begins at step 30 with the weights and the scale of the first."""
    first = torchrun("30", "checkpoints", cwd=tmp_path)
    assert [row[0] for row in first] == [0, 10, 20, 29]
    # A guess among 256 bytes costs ln 256 = 5.5.
    assert 5 < first[0][1] < 7
    assert first[-1][1] < first[0][1] - 2
    second = torchrun("42", "checkpoints", cwd=tmp_path)
    assert [row[0] for row in second] == [30, 40, 41]
    assert second[0][1] < first[-1][1] + 0.5
    assert second[0][3] == first[-1][3]
