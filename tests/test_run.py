"""``lucid-amp run``: a script that does not notice that it is watched, and a folder that tells about it.

Scripts run in children of a server that has loaded PyTorch once; where the very end of a process matters (its
exit status, its last words), in processes of their own.
"""

import functools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lucid
from lucid.amp._journal import read_lines
from lucid.amp.cli import main
from lucid.amp.cli.report._build import content_of
from lucid.amp.cli.report._findings import findings
from lucid.amp.cli.report._run import read
from lucid.amp.history import History

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[1] / "examples"
TEN = sorted(path.name for path in SCRIPTS.glob("*.py"))

SERVER = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
PRELOADED = (
    "torch",
    "torch._dynamo",  # every optimizer loads it at its first step
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


def _child(words: list[str], folder: str, watched: bool, hidden: str | None) -> None:
    """In a child: run a script, as ``lucid-amp`` or as ``python`` does, with its output going to files."""
    os.chdir(folder)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    if hidden:
        sys.modules[hidden] = None  # type: ignore[assignment]
    try:
        if watched:
            sys.exit(main(words))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    except Exception:
        # What the interpreter does with an exception that nobody caught.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def in_child(words: list[Any], folder: Path, watched: bool = True, hidden: str | None = None) -> Done:
    """Run a script, or lucid-amp, in a child of the server."""
    folder.mkdir(exist_ok=True)
    child = SERVER.Process(target=_child, args=([str(word) for word in words], str(folder), watched, hidden))
    child.start()
    child.join(120)
    return Done(child.exitcode, (folder / "out.txt").read_text(), (folder / "err.txt").read_text())


def by_python(words: list[Any], folder: Path) -> Done:
    """Run a script that needs no PyTorch with the interpreter itself."""
    command = [sys.executable, *(str(word) for word in words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    """This one, in which lucid is found from any folder."""
    return {**os.environ, "PYTHONPATH": str(Path(lucid.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """A script in a folder of its own."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def facts(folder: Path) -> dict[str, Any]:
    """What a run wrote about itself."""
    return json.loads((folder / "run.json").read_text())


def bits(path: Path) -> dict[str, Any]:
    """What a script saved, its parameters as bytes: a NaN equals itself."""
    saved = torch.load(path)
    model = {name: value.contiguous().view(-1).view(torch.uint8).tolist() for name, value in saved["model"].items()}
    return {"model": model, "scale": saved["scale"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Done, dict[str, Any]]]:
    """What a script says and saves without lucid, run once."""

    @functools.cache
    def run(name: str) -> tuple[Done, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("alone")
        done = in_child([SCRIPTS / name, folder / "alone.pt"], folder, watched=False)
        assert done.status == 0, done.err
        return done, bits(folder / "alone.pt")

    return run


@pytest.mark.parametrize("name", TEN)
def test_parameters_and_scale_are_those_of_the_script_alone(name: str, tmp_path: Path, alone: Any) -> None:
    """Watched, every parameter, buffer and scale is bit for bit what ``python train.py`` gives."""
    watched = in_child(["run", "--every", 3, SCRIPTS / name, tmp_path / "watched.pt"], tmp_path)
    assert watched.status == 0, watched.err
    assert bits(tmp_path / "watched.pt") == alone(name)[1]
    assert watched.out == alone(name)[0].out
    run = facts(tmp_path / "lucid-run")
    assert run["notes"] == [], "something was said to have failed"
    assert len(run["models"]) > 0


def test_there_are_ten_scripts() -> None:
    """The promise is about ten."""
    assert len(TEN) >= 10


# Not those with sparse gradients, whose values lucid sums before it divides them, nor those with a fused
# optimizer, which PyTorch calls for a skipped step too.
LUCID = ["plain.py", "clipping.py", "two_optimizers.py", "resumed.py"]


@pytest.mark.parametrize("name", LUCID)
def test_lucid_in_the_place_of_pytorch_trains_alike(name: str, tmp_path: Path, alone: Any) -> None:
    """With ``--scaler lucid`` the script's scalers are lucid's, and at powers of two the bits are the same."""
    words = ["run", "--scaler", "lucid", SCRIPTS / name, tmp_path / "swapped.pt"]
    swapped = in_child(words, tmp_path)
    assert swapped.status == 0, swapped.err
    assert bits(tmp_path / "swapped.pt") == alone(name)[1]
    run = facts(tmp_path / "lucid-run")
    assert run["notes"] == []
    assert {its["class"] for its in run["scalers"]} == {"lucid.amp.cli.run._adapter.PyTorchScaler"}


SHOW = """
'''A docstring.'''
import json, os, pickle, sys

class Thing:
    pass

main = sys.modules["__main__"]
copy = pickle.loads(pickle.dumps(Thing()))
print(json.dumps({
    "name": __name__, "doc": __doc__, "file": __file__, "package": __package__, "builtins": type(__builtins__).__name__,
    "spec": __spec__ and __spec__.name, "globals": main.__dict__ is globals(), "pickled": type(copy) is Thing,
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "loader": type(__loader__).__name__,
    "note": Thing.__init__.__annotations__ if hasattr(Thing.__init__, "__annotations__") else None,
}))
print("words on standard error", file=sys.stderr)
"""


def test_a_script_finds_what_python_gives_it(tmp_path: Path) -> None:
    """Name, file, arguments, path and module are those of ``python train.py``; so are output and error output."""
    path = script(tmp_path / "deep", SHOW)
    (tmp_path / "link.py").symlink_to(path)
    for name in ("deep/train.py", "link.py"):
        words = [name, "--lr", "3", "--out", "x", "-m", "--", "--every"]
        alone = by_python(words, tmp_path)
        watched = in_child(["run", "--every", 7, *words], tmp_path)
        assert watched.status == alone.status == 0
        assert json.loads(watched.out) == json.loads(alone.out)
        assert watched.err.startswith(alone.err)


def test_a_module_is_found_as_python_finds_it(tmp_path: Path) -> None:
    """``-m package.module`` and ``-m package`` run what ``python -m`` runs, from the folder one is in."""
    script(tmp_path / "package", "", "__init__.py")
    script(tmp_path / "package", SHOW, "module.py")
    script(tmp_path / "package", SHOW, "__main__.py")
    for name in ("package.module", "package"):
        alone = by_python(["-m", name, "--lr", "3"], tmp_path)
        watched = in_child(["run", "-m", name, "--lr", "3"], tmp_path)
        assert watched.status == alone.status == 0, watched.err
        assert json.loads(watched.out) == json.loads(alone.out)


def test_a_folder_and_an_archive_are_run(tmp_path: Path) -> None:
    """What has a ``__main__.py`` inside runs as with Python itself."""
    script(tmp_path / "folder", SHOW, "__main__.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW.replace("pickle.loads(pickle.dumps(Thing()))", "Thing()"))
    for name in ("folder", "archive.zip"):
        alone, watched = by_python([name, "x"], tmp_path), in_child(["run", name, "x"], tmp_path)
        assert watched.status == alone.status == 0, watched.err
        assert json.loads(watched.out) == json.loads(alone.out)


ENDINGS = {
    "end": ("print('done')", 0),
    "exit 3": ("import sys; sys.exit(3)", 3),
    "exit None": ("import sys; sys.exit()", 0),
    "exit with words": ("import sys; sys.exit('so it ends')", 1),
    "os._exit": ("import os; os._exit(4)", 4),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "exception": ("def f():\n    raise ValueError('no')\ntry:\n    1/0\nexcept ZeroDivisionError:\n    f()", 1),
    "syntax": ("x = = 1", 1),
    "own hook": ("import sys\nsys.excepthook = lambda *a: print('mine', a[0], file=sys.stderr)\n1/0", 1),
    "own handler": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(9))\n"
        "os.kill(os.getpid(), signal.SIGTERM)",
        9,
    ),
    "group": ("raise ExceptionGroup('many', [ValueError(1), TypeError(2)])", 1),
}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no such signals")
@pytest.mark.parametrize("name", [name for name in ENDINGS if name != "group" or sys.version_info >= (3, 11)])
def test_a_script_ends_as_with_python(name: str, tmp_path: Path) -> None:
    """Status and last words are those of ``python train.py``: no line of ours in the traceback."""
    text, status = ENDINGS[name]
    path = script(tmp_path, text)
    alone, watched = by_python([path], tmp_path), in_child(["run", path], tmp_path)
    assert (watched.status, alone.status) == (status, status)
    assert watched.out == alone.out
    assert watched.err.endswith(alone.err)
    assert "lucid/amp" not in watched.err


SCALED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
def backward(x=torch.ones(2, 4)):
    scaler.scale(model(x).float().sum()).backward()
"""
RAISES = {
    "float16 parameters": "model.half()\nbackward(torch.ones(2, 4).half())\nscaler.step(optimizer)",
    "a cause and a context": (
        "class Bad(torch.optim.SGD):\n    def step(self, closure=None):\n        1 / 0\n"
        "backward()\ntry:\n    scaler.step(Bad(model.parameters(), lr=0.1))\nexcept ZeroDivisionError as error:\n"
        "    try:\n        scaler.unscale_(optimizer)\n        scaler.unscale_(optimizer)\n"
        "    except RuntimeError:\n        raise KeyError('mine') from error"
    ),
    "clipping": (
        "backward()\nmodel[0].weight.grad[0] = torch.nan\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)"
    ),
    "a scaler that cannot be made": "torch.amp.GradScaler('cpu', growth_factor=0.5)",
}


@pytest.mark.parametrize("name", RAISES)
def test_a_traceback_shows_nothing_of_what_watches(name: str, tmp_path: Path) -> None:
    """Through scaler, optimizer and clipping, with what stands behind it: the very lines of ``python train.py``."""
    script(tmp_path, SCALED + RAISES[name])
    alone, watched = by_python(["train.py"], tmp_path), in_child(["run", "train.py"], tmp_path)
    assert (watched.status, alone.status) == (1, 1)
    assert watched.err.endswith(alone.err), watched.err


HOOKED = str(Path("torch", "nn", "modules", "module.py"))


def test_a_traceback_out_of_a_forward_has_frames_of_pytorch_more(tmp_path: Path) -> None:
    """PyTorch calls a module that has hooks from a function of its own; the lines of the script are the same."""
    script(tmp_path, SCALED + "backward(torch.ones(2, 5))")
    alone, watched = by_python(["train.py"], tmp_path), in_child(["run", "train.py"], tmp_path)
    mine, its = ([line for line in done.err.splitlines() if " File " in line] for done in (watched, alone))
    assert [line for line in mine if "lucid/amp" in line] == []
    assert [line for line in mine if HOOKED not in line] == [line for line in its if HOOKED not in line]
    assert len([line for line in mine if HOOKED in line]) > len([line for line in its if HOOKED in line])


@pytest.mark.alone
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no such signals")
def test_an_interrupt_ends_the_process_by_the_signal(tmp_path: Path) -> None:
    """Ctrl-C in a script: the report is drawn, then the process dies of SIGINT, as a shell expects to see."""
    path = script(tmp_path, "print('on', flush=True)\nraise KeyboardInterrupt")
    command = [sys.executable, "-m", "lucid.amp", "run", str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "on\n")
    assert done.stderr.endswith(by_python([path], tmp_path).err)
    assert facts(tmp_path / "lucid-run")["ending"] == "KeyboardInterrupt"
    assert (tmp_path / "lucid-run" / "report.html").exists()


def test_a_script_without_a_scaler_is_told_so(tmp_path: Path) -> None:
    """No scaler: the summary and the report say it, and answer whether float16 would work."""
    text = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
    done = in_child(["run", "--every", 2, script(tmp_path, text)], tmp_path)
    assert done.status == 0
    assert "The script made no gradient scaler" in done.err
    assert "float16 would work here" in done.err
    sample = json.loads((tmp_path / "lucid-run" / "ranges.json").read_text())
    assert (sample["first"]["step"], sample["last"]["step"]) == (0, 4)
    assert [row["name"] for row in sample["last"]["rows"]][:2] == ["weight", "bias"]


def test_a_scaler_that_is_switched_off_is_told_of(tmp_path: Path) -> None:
    """A disabled scaler is no scaler, and the report says who switched it off."""
    text = "import torch; scaler = torch.amp.GradScaler('cpu', enabled=False)"
    done = in_child(["run", script(tmp_path, text)], tmp_path)
    assert "The script's scaler was switched off" in done.err


TRAIN = """
import os, signal, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(8):
    x = torch.randn(8, 4)
    if step == 3:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step == int((sys.argv + ["99"])[1]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no such signals")
def test_a_killed_run_can_be_reported(tmp_path: Path) -> None:
    """Killed in the middle, all updates until then are there, and ``lucid-amp report`` draws them."""
    done = in_child(["run", script(tmp_path, TRAIN), "5"], tmp_path)
    assert done.status == -signal.SIGKILL
    folder = tmp_path / "lucid-run"
    assert len(History.read(folder / "updates.jsonl")) == 6
    assert not (folder / "report.html").exists()
    told = in_child(["report", folder], tmp_path)
    assert told.status == 0
    assert "The script has not come to its end" in told.err
    assert "the batch itself is not finite" in told.err
    assert {"scale.png", "ranges.png", "report.html"} <= {path.name for path in folder.iterdir()}


def test_a_run_leaves_its_folder(tmp_path: Path) -> None:
    """The promised files, with every update and the cause of the one that was skipped."""
    done = in_child(["run", "--every", 2, "--save-batch", script(tmp_path, TRAIN)], tmp_path)
    folder = tmp_path / "lucid-run"
    assert done.status == 0
    assert {"updates.jsonl", "scale.png", "ranges.png", "report.html", "batch.pt"} <= set(os.listdir(folder))
    history = History.read(folder / "updates.jsonl")
    assert [record.overflow for record in history] == [False] * 3 + [True] + [False] * 4
    assert (history[3].kind, history[3].new_scale) == ("loss not finite", 512.0)
    # Sampled at 0, 2, 4 and 6.
    assert [record.step for record in history if record.zero is not None] == [0, 2, 4, 6]
    batch = torch.load(folder / "batch.pt", weights_only=False)
    assert batch["args"][0].isnan().sum().item() == 1
    assert facts(folder)["models"][0]["name"] == "model"
    assert "1 of 8 updates was skipped" in done.err
    assert str(folder / "report.html") in done.err


ACCUMULATES = """
import torch
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return x * x

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), Square(), nn.Linear(8, 2))
first, second = torch.optim.SGD(model[0].parameters(), lr=1e-3), torch.optim.Adam(model[2].parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for update in range(8):
    for optimizer in (first, second):
        optimizer.zero_grad()
    for micro in range(4):
        x = torch.randn(8, 4) * (2000 if BAD else 1)
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean() / 4
        scaler.scale(loss).backward()
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
"""
ACCUMULATIONS = {"every": "True", "first": "micro == 0", "middle": "micro == 2", "later": "update > 3 and micro == 1"}


@pytest.mark.parametrize("scaler", ["script", "lucid"])
@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_the_layer_is_told_in_whichever_micro_batch(name: str, scaler: str, tmp_path: Path) -> None:
    """With four backward passes an update and two optimizers: the layer, the reason, the batch; nothing is doubled."""
    text = ACCUMULATES.replace("BAD", ACCUMULATIONS[name])
    done = in_child(["run", "--scaler", scaler, "--save-batch", script(tmp_path, text)], tmp_path)
    assert done.status == 0
    assert 'The loss was not finite, in "1": an output beyond float16\'s 65504' in done.err
    assert "times 65504" in done.err
    batch = torch.load(tmp_path / "lucid-run" / "batch.pt", weights_only=False)
    assert batch["args"][0].abs().max() > 1000
    assert "wrote no batch" not in done.err
    content = content_of(read(tmp_path / "lucid-run"))
    (table,) = [section.table for section in content.sections if section.key == "skips"]
    assert table is not None
    for *_, found in table.rows:
        assert found.words.startswith("SGD, Adam: The loss of backward ")
        assert found.words.count("The loss of backward") == 1


def test_what_is_not_kept_is_told_in_the_words_of_run(tmp_path: Path) -> None:
    """``--keep 1`` of four: the terminal and the page say which option keeps more, and why no batch was written."""
    text = ACCUMULATES.replace("BAD", "micro == 0")
    done = in_child(["run", "--keep", 1, "--save-batch", script(tmp_path, text)], tmp_path)
    assert done.status == 0
    folder = tmp_path / "lucid-run"
    told = " ".join(done.err.split())
    move = "lucid-amp run --keep 4 keeps the inputs of all 4 backward passes: then the layer is told."
    assert f"→ No scale can help. {move}" in told
    assert f"--save-batch wrote no batch. The inputs of that forward were no longer kept. {move}" in told
    assert not (folder / "batch.pt").exists()
    page = (folder / "report.html").read_text("utf-8")
    assert move in page and "--save-batch wrote no batch" in page
    assert "watch(" not in page
    again = in_child(["run", "--keep", 4, script(tmp_path, text)], tmp_path)
    assert 'The loss was not finite, in "1"' in again.err


UNSAVED = {
    "all is well": (TRAIN.replace("step == 3", "False"), [], "No loss was found that was not finite."),
    "nobody watches": (TRAIN, ["--no-watch"], "--no-watch was given, and inputs are kept where models are watched."),
    "no scaler": ("import torch", [], "No scaler was at work."),
    "no model": (
        "import torch; s = torch.amp.GradScaler('cpu'); s.scale(torch.ones(1)); s.update(1.0)",
        [],
        "No model was called by the script itself, on its main thread.",
    ),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_a_batch_that_was_asked_for_and_not_written_is_told_of(name: str, tmp_path: Path) -> None:
    """In the terminal and among what is to be known: why ``--save-batch`` wrote nothing."""
    text, options, why = UNSAVED[name]
    done = in_child(["run", *options, "--save-batch", script(tmp_path, text)], tmp_path)
    assert done.status == 0
    assert f"--save-batch wrote no batch. {why}" in " ".join(done.err.split())
    assert facts(tmp_path / "lucid-run")["notes"] == [f"--save-batch wrote no batch. {why}"]


@pytest.mark.parametrize("scaler", ["script", "lucid"])
def test_without_a_watch_the_next_move_is_an_option_of_run(scaler: str, tmp_path: Path) -> None:
    """``--no-watch`` hides the cause; what is advised is to leave that out, not a call that the user never made."""
    text = TRAIN.replace("step == 3", "step > 2")
    done = in_child(["run", "--no-watch", "--scaler", scaler, script(tmp_path, text)], tmp_path)
    assert "lucid-amp run watches a model where it is not told --no-watch" in " ".join(done.err.split())
    assert "diagnosis." not in done.err


def test_without_replay_the_option_is_named(tmp_path: Path) -> None:
    """What hides the module is told as it was said: ``--no-replay``."""
    done = in_child(["run", "--no-replay", script(tmp_path, TRAIN)], tmp_path)
    assert "The forward was not run again: --no-replay was given." in " ".join(done.err.split())
    assert "→ No scale can help. Without --no-replay the layer is told" in " ".join(done.err.split())


def test_scalers_alone_are_watched_on_demand(tmp_path: Path) -> None:
    """``--no-watch`` touches no module; updates are recorded all the same."""
    in_child(["run", "--no-watch", script(tmp_path, TRAIN)], tmp_path)
    folder = tmp_path / "lucid-run"
    assert facts(folder)["models"] == []
    assert len(History.read(folder / "updates.jsonl")) == 8


def test_no_forward_is_run_again_on_demand(tmp_path: Path) -> None:
    """``--no-replay``: the script's forwards are the only ones."""
    text = TRAIN + "print(calls)\n"
    counted = text.replace("for step", "calls = 0\ndef count(*a):\n    global calls\n    calls += 1\n"
        "model[0].register_forward_hook(count)\nfor step", 1)  # fmt: skip
    out = {}
    for option in ("--no-replay", "--every=100"):
        done = in_child(["run", option, script(tmp_path, counted)], tmp_path)
        out[option] = int(done.out)
    assert out["--no-replay"] == 8
    assert out["--every=100"] > 8, "nothing was replayed, so that the first half shows nothing"


def test_each_run_gets_a_folder_and_a_named_one_is_gone_on_with(tmp_path: Path) -> None:
    """Without ``--out`` an earlier run is left alone; with it, updates follow those that are there."""
    path = script(tmp_path, TRAIN)
    in_child(["run", path], tmp_path)
    in_child(["run", path], tmp_path)
    again = in_child(["run", "--out", "lucid-run", path], tmp_path)
    assert again.status == 0
    assert len(History.read(tmp_path / "lucid-run-2" / "updates.jsonl")) == 8
    history = History.read(tmp_path / "lucid-run" / "updates.jsonl")
    assert [record.step for record in history] == list(range(16))


def test_a_picture_that_fails_changes_neither_status_nor_record(tmp_path: Path) -> None:
    """A report that cannot be written costs a line, and is drawn later."""
    text = TRAIN + "os.mkdir('lucid-run/report.html')\nsys.exit(3)\n"
    done = in_child(["run", script(tmp_path, text)], tmp_path)
    assert done.status == 3
    assert "the report could not be drawn (IsADirectoryError" in done.err
    assert len(History.read(tmp_path / "lucid-run" / "updates.jsonl")) == 8
    refused = in_child(["report", "lucid-run"], tmp_path)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    (tmp_path / "lucid-run" / "report.html").rmdir()
    assert in_child(["report", "lucid-run"], tmp_path).status == 0


def test_what_fails_in_the_watching_is_noted(tmp_path: Path) -> None:
    """A model that cannot be watched trains as before, and the report says what failed."""
    text = TRAIN.replace(
        "torch.manual_seed(0)",
        "class Odd(nn.Sequential):\n    def register_forward_pre_hook(self, *a, **k):\n        raise KeyError('odd')",
    ).replace("model = nn.Sequential(", "model = Odd(")
    done = in_child(["run", script(tmp_path, text)], tmp_path)
    assert done.status == 0
    folder = tmp_path / "lucid-run"
    assert any("KeyError: 'odd'" in note for note in facts(folder)["notes"])
    assert len(History.read(folder / "updates.jsonl")) == 8


DEAD = """
import torch
from torch import nn
def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    optimizer, scaler = torch.optim.SGD(model[:1].parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
main()
"""


def test_a_model_that_is_gone_at_the_end_is_told_of(tmp_path: Path) -> None:
    """What was wrong in a function's own model is known though the function has returned."""
    done = in_child(["run", "--every", 2, script(tmp_path, DEAD)], tmp_path)
    assert 'Gradients are exactly zero, in "1": a module puts out nothing but zeros' in done.err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_the_script_forks_writes_nothing(tmp_path: Path) -> None:
    """A script that goes on in two processes leaves the record of the first, and one report."""
    text = TRAIN.replace("for step in range(8):", "child = os.fork()\nfor step in range(8):")
    done = in_child(["run", "--every", 2, script(tmp_path, text + "if child: os.waitpid(child, 0)\n")], tmp_path)
    assert done.status == 0
    assert len(History.read(tmp_path / "lucid-run" / "updates.jsonl")) == 8
    assert done.err.count("report.html") == 1


def test_variables_that_come_too_late_are_noted(tmp_path: Path) -> None:
    """A script that sets PyTorch's threads in its environment is told that PyTorch was loaded before."""
    in_child(["run", script(tmp_path, "import os; os.environ['OMP_NUM_THREADS'] = '3'")], tmp_path)
    (note,) = facts(tmp_path / "lucid-run")["notes"]
    assert note.startswith("The script set OMP_NUM_THREADS.")


REFUSED = {
    "no script": (["run"], "needs a script"),
    "no such file": (["run", "nowhere.py"], "cannot open 'nowhere.py'"),
    "no such module": (["run", "-m", "nowhere.to.be.found"], "there is no module 'nowhere.to.be.found'"),
    "no main": (["run", "empty"], "there is no __main__.py in it"),
    "a file for a folder": (["run", "--out", "train.py", "train.py"], "cannot write to the folder 'train.py'"),
    "no run": (["report", "empty"], "there is no run in 'empty'"),
    "no number": (["run", "--every", "0", "train.py"], "must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_a_line_before_anything(name: str, tmp_path: Path) -> None:
    """One line on standard error, status 2, the script not started, no folder left."""
    words, line = REFUSED[name]
    script(tmp_path, "open('started', 'w')")
    (tmp_path / "empty").mkdir()
    done = in_child(words, tmp_path)
    assert (done.status, done.err.count("\n")) == (2, 1), done.err
    assert line in done.err
    assert sorted(os.listdir(tmp_path)) == ["empty", "err.txt", "out.txt", "train.py"]


def test_a_missing_extra_is_told_before_the_script_starts(tmp_path: Path) -> None:
    """Without matplotlib there would be no picture: one line, and the script has not begun."""
    done = in_child(["run", script(tmp_path, "open('started', 'w')")], tmp_path, hidden="matplotlib")
    assert done.status == 2
    install = "pip install 'lucid-amp[demo]' (in a checkout: pip install '.[demo]')"
    assert done.err == f"lucid-amp run: needs matplotlib, not installed here: {install}\n"
    assert not (tmp_path / "started").exists()


RANKS = """
import os, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(5):
    x = torch.randn(8, 4)
    if step == 2 and rank == 1:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
dist.destroy_process_group()
"""


@pytest.mark.alone
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_a_job_of_two_ranks_leaves_one_report(tmp_path: Path) -> None:
    """Under torchrun rank 0 reports, and tells the cause that only rank 1 saw."""
    path = script(tmp_path, RANKS)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lucid.amp", "run", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("report.html") == 1
    assert sorted(path.name for path in tmp_path.glob("lucid-run*")) == ["lucid-run"]
    folder = tmp_path / "lucid-run"
    for name in ("updates.jsonl", "updates.rank1.jsonl"):
        assert [record.overflow for record in History.read(folder / name)] == [False, False, True, False, False]
    (cause,) = [line for line in read_lines(folder / "causes.jsonl") if line["step"] == 2]
    assert (cause["causes"][0]["rank"], cause["causes"][0]["reason"]) == (1, "the batch itself is not finite")


TRAININGS = {
    "well": [("fine", "The scale was too high at first"), ("fine", "The backward overflowed")],
    "huge": [("act", 'The loss was not finite, in "1": an output beyond float16\'s 65504')],
    "plain": [("look", "The script made no gradient scaler"), ("fine", "What float16 would make of these gradients")],
}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_three_reports_of_the_docs_say_what_the_page_reads_in_them(name: str, tmp_path: Path) -> None:
    """Each of the three trainings is told as docs/reports.md tells it."""
    if not EXAMPLES.exists():
        pytest.skip("the examples are not beside the tests: these run on the wheel")
    done = in_child(["run", "--every", 20, EXAMPLES / "three_trainings.py", name], tmp_path)
    assert done.status == 0, done.err
    found = findings(read(tmp_path / "lucid-run"))
    for weight, title in TRAININGS[name]:
        assert [each.weight for each in found if each.title.startswith(title)] == [weight]
    if name == "plain":
        assert "float16 would work here for these gradients, with a scale near 2¹⁶" in " ".join(found[1].facts)
