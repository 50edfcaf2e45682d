"""Samples of gradients, taken as the backward leaves them, whatever the script does with them afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lucid.amp import GradScaler
from lucid.amp.cli.run._folder import Folder
from lucid.amp.cli.run._log import Options
from lucid.amp.cli.run._observer import Observer
from lucid.amp.cli.run._script import Script
from lucid.amp.history import History

MAKERS = {"lucid": GradScaler, "torch": lambda scale: torch.amp.GradScaler("cpu", scale)}


class Watched:
    """A training that is watched as ``lucid-amp run`` watches one; its weight has gradient 3 a backward."""

    def __init__(self, path: Path, every: int = 1) -> None:
        self.path = path
        self.observer = Observer(Script("train.py", (), is_module=False), Folder(path), Options(every=every))
        self.model = nn.Linear(1, 1, bias=False)

    def __enter__(self) -> "Watched":
        self.observer.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.observer.__exit__(*exception)
        self.observer.end("exit 0")
        assert self.observer.notes == []

    def backward(self, scaler: Any) -> None:
        """One micro-batch."""
        scaler.scale(self.model(torch.full((1, 1), 3.0)).sum()).backward()

    def sample(self, which: str = "last") -> dict[str, Any]:
        """What was written: the largest of the weight's gradient, true and scaled, and the update."""
        facts = json.loads((self.path / "ranges.json").read_text())[which]
        row = next(row for row in facts["rows"] if row["what"] == "parameter")
        return {"step": facts["step"], "scale": facts["scale"], "largest": row["spread"]["largest"]}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_sample_is_taken_before_unscaling_and_clipping(make: Any, tmp_path: Path) -> None:
    """The script unscales, clips and clears; the sample holds what the backward made: 3 times the scale."""
    with Watched(tmp_path) as run:
        scaler = make(1024.0)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        run.backward(scaler)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
    assert run.sample() == {"step": 0, "scale": 1024.0, "largest": 3 * 1024.0}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_accumulated_gradients_are_sampled_whole(make: Any, tmp_path: Path) -> None:
    """Three micro-batches before a step: the sample holds their sum."""
    with Watched(tmp_path) as run:
        scaler = make(1024.0)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for _ in range(3):
            run.backward(scaler)
        scaler.step(optimizer)
        scaler.update()
    assert run.sample()["largest"] == 9 * 1024.0


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_fused_optimizer_changes_nothing(make: Any, tmp_path: Path) -> None:
    """Whether the optimizer's kernel divides or the scaler does, the sample is the same."""
    with Watched(tmp_path) as run:
        scaler = make(1024.0)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, fused=True)
        run.backward(scaler)
        scaler.step(optimizer)
        scaler.update()
    assert run.sample() == {"step": 0, "scale": 1024.0, "largest": 3 * 1024.0}


def test_one_iteration_in_every_n_is_hooked(tmp_path: Path) -> None:
    """At updates 0, 3 and 6 of eight there is a hook on the weight, and at no other; the first sample is kept."""
    hooked = []
    with Watched(tmp_path, every=3) as run:
        scaler = GradScaler(1024.0)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss := run.model(torch.full((1, 1), 3.0)).sum()).backward()
            assert loss.isfinite()
            if run.model.weight._post_accumulate_grad_hooks:
                hooked.append(step)
            scaler.step(optimizer)
            scaler.update()
    assert hooked == [0, 3, 6]
    assert [run.sample(which)["step"] for which in ("first", "last")] == [0, 6]


def test_an_overflow_is_sampled_again_in_the_next_iteration(tmp_path: Path) -> None:
    """At an overflow nothing is to be seen: the history gets no share there, and the next iteration is sampled."""
    with Watched(tmp_path, every=4) as run:
        scaler = GradScaler(2.0**127)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            run.backward(scaler)
            scaler.step(optimizer)
            scaler.update()
    # 3 · 2¹²⁷ is beyond float32; 3 · 2¹²⁶ is not.
    assert run.sample("first") == run.sample("last") == {"step": 1, "scale": 2.0**126, "largest": 3 * 2.0**126}
    shares = [record.zero for record in History.read(tmp_path / "updates.jsonl")]
    assert shares == [None, 0.0, None, None]
    outputs = json.loads((tmp_path / "ranges.json").read_text())["last"]["rows"][1:]
    assert [(row["what"], row["spread"]["inf"]) for row in outputs] == [("output", 0)]


def test_a_row_of_overflows_is_not_sampled_for_ever(tmp_path: Path) -> None:
    """Where every iteration overflows, eight are tried in a row, and then one in every N."""
    hooked = []
    with Watched(tmp_path, every=20) as run:
        scaler = GradScaler(2.0**120)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for step in range(24):
            optimizer.zero_grad()
            scaler.scale(run.model(torch.full((1, 1), torch.inf)).sum()).backward()
            if run.model.weight._post_accumulate_grad_hooks:
                hooked.append(step)
            scaler.step(optimizer)
            scaler.update()
    assert hooked == [*range(9), 20]


def test_the_gradients_of_two_models_are_told_apart(tmp_path: Path) -> None:
    """With several models each row says whose it is, by a name that no other has."""
    with Watched(tmp_path) as run:
        scaler, other = GradScaler(1024.0), nn.Linear(1, 2, bias=False)
        optimizer = torch.optim.SGD([*run.model.parameters(), *other.parameters()], lr=0.1)
        scaler.scale(other(run.model(torch.ones(1, 1))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    rows = json.loads((tmp_path / "ranges.json").read_text())["last"]["rows"]
    assert [row["name"] for row in rows if row["what"] == "parameter"] == ["Linear.weight", "Linear-2.weight"]
    assert [row["shape"] for row in rows if row["what"] == "parameter"] == [[1, 1], [2, 1]]
