"""Where a warning points to: the user's line, whatever stands between; and what a filter by module makes of it."""

import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid._warning import warn
from lucid.amp import GradScaler
from lucid.amp._journal import Journal, read_lines
from lucid.amp.cli.run._adapter import CPUScaler, PyTorchScaler, swapped
from lucid.amp.cli.run._notice import Notice
from lucid.amp.diagnosis import watch
from lucid.amp.history import History


def places(action: Callable[[], object]) -> list[str]:
    """The files to which the warnings of an action point."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [warning.filename for warning in caught]


def frame_of(package: str) -> Callable[[Callable[[], Any]], Any]:
    """A function of a module of that name, which calls what it is given."""
    module = types.ModuleType(package)
    exec(compile("def call(inner):\n    return inner()", f"{package}.py", "exec"), vars(module))
    return vars(module)["call"]  # type: ignore[no-any-return]


def test_frames_of_the_package_and_of_pytorch_are_passed_over() -> None:
    """Through any number of them the line is the caller's."""
    ours, theirs = frame_of("lucid.amp.somewhere"), frame_of("torch._somewhere")
    assert places(lambda: warn("m")) == [__file__]
    assert places(lambda: ours(partial(theirs, partial(ours, partial(warn, "m"))))) == [__file__]


@pytest.mark.parametrize("package", ["lucid_train", "torchvision.models", "trainer"])
def test_a_name_that_only_begins_alike_is_a_user_s(package: str) -> None:
    """A trainer's own line is pointed to, also where its name begins with ours."""
    theirs = frame_of("torch._somewhere")
    assert places(lambda: frame_of(package)(partial(theirs, partial(warn, "m")))) == [f"{package}.py"]


def collapse(scaler: Any) -> None:
    """One skip that takes the scale below 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum())
    weight.grad = torch.tensor([torch.inf])
    scaler.step(optimizer)
    scaler.update()


def watched() -> GradScaler:
    """A scaler whose skips a watch and a history hear."""
    scaler, model = GradScaler(1.0), torch.nn.Linear(1, 1)
    KEPT.extend((History(scaler), watch(model, scaler, report=None), model))
    return scaler


KEPT: list[Any] = []
MADE = {
    "lucid": lambda: GradScaler(1.0),
    "for PyTorch's": lambda: PyTorchScaler("cpu", 1.0),
    "without a device": lambda: CPUScaler(1.0),
    "watched": watched,
}


@pytest.mark.parametrize("name", MADE)
def test_a_falling_scale_is_told_at_the_line_that_updates(name: str) -> None:
    """Also through a subclass, and through stand-ins of those who listen."""
    scaler = MADE[name]()
    assert places(lambda: collapse(scaler)) == [__file__]


def test_a_filter_by_module_matches() -> None:
    """A script that ignores the warnings of its own module is not warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__)
        collapse(PyTorchScaler("cpu", 1.0))
    assert caught == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA: nothing is switched off")
def test_a_scaler_that_is_switched_off_is_told_where_it_was_made() -> None:
    """In the place of PyTorch's and noticed as it is made, as under ``lucid-amp run``."""
    with swapped(), Notice(lambda scaler: None):
        assert places(lambda: torch.cuda.amp.GradScaler()) == [__file__]


def test_a_journal_warns_at_the_line_that_reads_it(tmp_path: Path) -> None:
    """Through a history, too."""
    path = tmp_path / "updates.jsonl"
    journal = Journal(path)
    journal.append(0, {"scale": 1.0, "new_scale": 1.0, "overflow": False, "skipped": [False]})
    with path.open("ab") as file:
        file.write(b"no json\n")
    assert places(lambda: read_lines(path)) == [__file__]
    assert places(lambda: History.read(path)) == [__file__]
