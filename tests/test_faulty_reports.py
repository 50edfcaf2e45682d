"""Ten faulty trainings, each of which a report must tell by kind and module, with either scaler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import FAULTY, Faulty

from lucid.amp import GradScaler
from lucid.amp.cli.report._content import Finding
from lucid.amp.cli.report._findings import findings
from lucid.amp.cli.report._run import read
from lucid.amp.cli.run._folder import Folder
from lucid.amp.cli.run._log import Options
from lucid.amp.cli.run._observer import Observer
from lucid.amp.cli.run._script import Script

MAKERS: dict[str, Callable[..., Any]] = {
    "lucid": GradScaler,
    "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings),
}

# What the titles of the report call the kinds.
TITLES = {
    "loss not finite": "The loss was not finite",
    "backward overflowed": ("The backward overflowed", "The scale was too high at first"),
    "gradients never cleared": "Gradients that were not finite were never cleared",
    "float16 parameter": "A parameter is float16",
    "gradients exactly zero": "Gradients are exactly zero",
}


def reported(case: Faulty, make: Callable[..., Any], path: Path) -> tuple[Finding, ...]:
    """What the report says of a training that was run as ``lucid-amp run`` runs it."""
    observer = Observer(Script("train.py", (), is_module=False), Folder(path), Options(every=4))
    ending = "exit 0"
    with observer:
        scaler = make(init_scale=case.init_scale)
        kept: list[Any] = []
        try:
            case.train(scaler, kept.append)
        except Exception as error:
            ending = f"{type(error).__name__}: {error}"
    observer.end(ending)
    assert observer.notes == []
    return findings(read(path))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("case", FAULTY.values(), ids=FAULTY)
def test_the_report_tells_the_kind_and_the_module(case: Faulty, make: Callable[..., Any], tmp_path: Path) -> None:
    """One of the three findings that are shown first has the fault's kind, reason and place."""
    first = reported(case, make, tmp_path)[:3]
    told = [finding for finding in first if finding.title.startswith(TITLES[case.kind])]
    assert len(told) == 1, [finding.title for finding in first]
    text = " ".join([told[0].title, *told[0].facts])
    # A module stands in quotes; "the loss function" is no module, and stands as it is.
    quoted = [place if " " in place else f'"{place}"' for place in case.where]
    assert [place for place in quoted if place not in text] == []
    if case.reason is not None:
        assert case.reason in told[0].title
    assert told[0].advice
