"""`lucid-amp run`: a script that does not notice that it is watched, and a folder that tells about it.

Scripts run in children of a server that has loaded PyTorch once; where the very end of a process matters (its
exit status, its last words), in processes of their own.
"""

import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lucid.amp.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
TEN = sorted(path.name for path in SCRIPTS.glob("*.py"))

SERVER = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
PRELOADED = (
    "torch",
    "torch._dynamo",  # every optimizer loads it at its first step
    "torch._functorch.aot_autograd",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "lucid.amp.cli.run._adapter",
    "lucid.amp.cli.report._build",
    "lucid.amp.cli.report._page",
)
if hasattr(os, "fork"):
    SERVER.set_forkserver_preload(list(PRELOADED))


class Done(NamedTuple):
    """A run that ended: its status and what it said."""

    status: int | None
    out: str
    err: str


def _child(words: list[str], folder: str, watched: bool) -> None:
    """In a child: run a script, as `lucid-amp` or as `python` does, with its output going to files."""
    os.chdir(folder)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    if watched:
        sys.exit(main(["run", *words]))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def in_child(words: list[Any], folder: Path, watched: bool = True) -> Done:
    """Run a script in a child of the server."""
    folder.mkdir(exist_ok=True)
    child = SERVER.Process(target=_child, args=([str(word) for word in words], str(folder), watched))
    child.start()
    child.join(120)
    return Done(child.exitcode, (folder / "out.txt").read_text(), (folder / "err.txt").read_text())


def bits(path: Path) -> dict[str, Any]:
    """What a script saved, its parameters as bytes: a NaN equals itself."""
    saved = torch.load(path)
    model = {name: value.contiguous().view(-1).view(torch.uint8).tolist() for name, value in saved["model"].items()}
    return {"model": model, "scale": saved["scale"]}


@pytest.mark.parametrize("script", TEN)
def test_parameters_and_scale_are_those_of_the_script_alone(script: str, tmp_path: Path) -> None:
    """Watched, every parameter, buffer and scale is bit for bit what `python train.py` gives."""
    alone = in_child([SCRIPTS / script, tmp_path / "alone.pt"], tmp_path / "alone", watched=False)
    watched = in_child(["--every", 3, SCRIPTS / script, tmp_path / "watched.pt"], tmp_path / "watched")
    assert (alone.status, watched.status) == (0, 0), alone.err + watched.err
    assert bits(tmp_path / "watched.pt") == bits(tmp_path / "alone.pt")
    assert watched.out == alone.out
    run = json.loads((tmp_path / "watched" / "lucid-run" / "run.json").read_text())
    assert run["notes"] == [], "something was said to have failed"
    assert len(run["models"]) > 0


def test_there_are_ten_scripts() -> None:
    """The promise is about ten."""
    assert len(TEN) >= 10
