"""Each example runs in a process of its own, warns of nothing, and shows what it says it shows."""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import lucid

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parent / "examples"


def numbers(label: str, text: str) -> list[float]:
    """The numbers that follow a label, in the order in which they were printed."""
    return [float(found) for found in re.findall(rf"{label} +([-+.\de]+|inf|nan)", text)]


def quickstart(output: str) -> None:
    """The loss falls by a factor of a hundred, in float16, with float32 weights."""
    first, *_, last = numbers("loss", output)
    assert last < first / 100
    assert "ran in torch.float16, the weights are torch.float32, 0 steps skipped" in output


def clipping(output: str) -> None:
    """Both ways of clipping agree, and the weights are much nearer to the truth than without."""
    without, two_calls, one_call = numbers("weights", output)
    assert one_call == pytest.approx(two_calls, abs=2e-3)
    assert max(one_call, two_calls) < without / 4
    norms = numbers("norm", output)
    assert norms[1] == pytest.approx(norms[2], rel=0.01)
    assert min(norms) > 1


def accumulation(output: str) -> None:
    """The loss falls; the sum over micro-batches is the whole batch's gradient within float16's rounding."""
    losses, errors = numbers("loss", output), numbers("batch:", output)
    assert losses[-1] < losses[0] / 20
    assert len(errors) == 3
    assert all(0 < percent < 2 for percent in errors)


def gan(output: str) -> None:
    """The radius comes near 2 from far below; the first scales overflow and are halved."""
    radii, scales = numbers("radius", output), numbers("scale", output)
    assert radii[0] < 1
    assert 1.6 < radii[3] < 2.4
    assert scales[-1] < 2.0**20
    assert re.search(r"skipped steps: \{'generator': \d+, 'critic': [1-9]", output)


def checkpoint(output: str) -> None:
    """The resumed run begins at the saved scale, which had moved, and ends with the same weights."""
    saved, loaded = numbers("scale", output)
    assert saved == loaded < 2.0**24
    assert "equal bit for bit: True" in output


OUTCOMES: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (quickstart, clipping, accumulation, gan, checkpoint)
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_example_shows_what_it_says(name: str, tmp_path: pathlib.Path) -> None:
    """It ends well, warns of nothing but a missing GPU, leaves no file, and its numbers tell its story."""
    quiet = ["-W", "error", "-W", 'ignore:"metal" is the CPU']
    command = [sys.executable, *quiet, str(EXAMPLES / f"{name}.py")]
    found = os.environ | {"PYTHONPATH": str(pathlib.Path(lucid.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    OUTCOMES[name](done.stdout)


def test_every_example_is_run_by_a_test() -> None:
    """No example is left to rot: each is named by a test file."""
    tests = " ".join(path.read_text() for path in HERE.glob("**/test_*.py"))
    examples = [path.stem for path in EXAMPLES.glob("*.py")]
    assert set(OUTCOMES) <= set(examples)
    assert [name for name in examples if not re.search(rf"\b{name}\b", tests)] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_fits_on_a_page(path: pathlib.Path) -> None:
    """At most 60 lines, the first of which say what it shows."""
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert text.startswith('"""')
