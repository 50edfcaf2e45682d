"""Ten faulty trainings, each of which must be told by the right kind, reason and module, with either scaler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty import FAULTY, Faulty

from lucid.amp import GradScaler
from lucid.amp.diagnosis import Explanation, explain, watch

MAKERS: dict[str, Callable[..., Any]] = {
    "lucid": GradScaler,
    "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings),
}


def explained(case: Faulty, make: Callable[..., Any]) -> Explanation:
    """What is said of a training after it went wrong."""
    scaler = make(init_scale=case.init_scale)

    def train() -> None:
        case.train(scaler, lambda model: watch(model, scaler, report=None))

    if case.raises is None:
        train()
    else:
        with pytest.raises(case.raises):
            train()
    return explain(scaler)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("case", FAULTY.values(), ids=FAULTY)
def test_the_right_kind_and_module(case: Faulty, make: Callable[..., Any]) -> None:
    """The explanation names what is wrong, why, and where."""
    explanation = explained(case, make)
    assert (explanation.kind, explanation.reason, explanation.where) == (case.kind, case.reason, case.where)


# Words that must stand in the text, so that a person knows what was seen and what to do.
SAID = {
    "nan_in_the_data": ("update 7", "1 NaN among 256 values", "Mend the data"),
    "huge_activation": ("times 65504", "in float32", "bfloat16"),
    "diverging_learning_rate": ("has grown from", "lower the learning rate"),
    "scale_too_high": ("The loss was finite", "at scale", "helps by itself"),
    "never_cleared": ("left over from update 0", "zero_grad()"),
    "tiny_eps": ("in float32, its largest output is", "an eps of 1e-8 is 0"),
    "sum_loss": ("at scale 32,768", "a mean instead of a sum"),
    "log_of_zero": ("The loss was inf", "every module's output was finite", "logarithm"),
    "stray_half_layer": ('"2.weight", "2.bias"', ".float()"),
    "dead_relu": ("3 of 3", 'Nothing but zeros comes out of "1"', "ReLU"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name: str, make: Callable[..., Any]) -> None:
    """The text holds the numbers that were seen and the next move."""
    text = str(explained(FAULTY[name], make))
    assert [words for words in SAID[name] if words not in text] == []


def test_all_ten_are_told() -> None:
    """There are ten faults, and each has its words."""
    assert len(FAULTY) == 10 and set(SAID) == set(FAULTY)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_each_shows_without_a_watch_too(make: Callable[..., Any]) -> None:
    """Unwatched, each training goes through its fault alike: the functions do not lean on being watched."""
    for case in FAULTY.values():
        scaler = make(init_scale=case.init_scale)
        if case.raises is None:
            case.train(scaler)
            skips = case.kind in ("loss not finite", "backward overflowed", "gradients never cleared")
            assert (scaler.get_scale() < case.init_scale) is skips
