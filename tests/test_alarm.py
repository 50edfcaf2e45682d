"""When a collapse of the scale is spoken of, and how often."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lucid.amp import GradScaler
from lucid.amp._alarm import Alarm
from lucid.amp._schedule import ScaleUpdate


def said(
    alarm: Alarm, index: int, scale: float, new_scale: float, overflow: bool = True, given: bool = False
) -> list[str]:
    """The messages after one update."""
    update = ScaleUpdate(index, scale, new_scale, overflow, (overflow,))
    return list(alarm.messages(update, lambda: ["head.weight"], given))


def test_falling_below_one_is_said_once() -> None:
    """At 1 nothing is said; below it once, with the scale; not again, even after it was above 1 in between."""
    alarm = Alarm()
    assert said(alarm, 0, 2.0, 1.0) == []
    (message,) = said(alarm, 1, 1.0, 0.5)
    assert "below 1" in message
    assert "0.5" in message
    assert said(alarm, 2, 0.5, 0.25) == []
    assert said(alarm, 3, 0.25, 2.0, overflow=False) == []
    assert said(alarm, 4, 2.0, 0.5) == []


def test_a_scale_that_began_below_one_is_not_spoken_of() -> None:
    """Losses summed over a batch train well at 0.004: who starts there did not fall."""
    assert said(Alarm(), 0, 0.004, 0.002) == []


def test_a_scale_that_was_set_did_not_fall() -> None:
    """Who sets 0.25 knows of it; the next fall, from above 1 by an overflow, is spoken of."""
    alarm = Alarm()
    assert said(alarm, 0, 8.0, 0.25, given=True) == []
    assert len(said(alarm, 1, 2.0, 0.5)) == 1


def test_a_row_of_25_skips_is_said_once_with_its_beginning_and_the_names() -> None:
    """After the 25th in a row: how many, since which update, and which parameters; nothing at the 24th or 26th."""
    alarm = Alarm()
    assert said(alarm, 6, 8.0, 8.0, overflow=False) == []
    spoken = [said(alarm, 7 + count, 64.0, 64.0) for count in range(60)]
    assert [count for count, messages in enumerate(spoken, 1) if messages] == [25]
    (message,) = spoken[24]
    for part in ("25 updates in a row", "since update 7", "'head.weight'", "64.0"):
        assert part in message


def test_good_updates_need_not_be_told() -> None:
    """24 overflows, an update that nobody tells of, and 24 more are no row; the 25th of the second is."""
    alarm = Alarm()
    spoken = [said(alarm, index, 64.0, 64.0) for index in (*range(24), *range(25, 50))]
    assert [len(messages) for messages in spoken] == [0] * 48 + [1]


def test_a_good_update_ends_the_row() -> None:
    """Twice 24 with a good one between is no row; a second row of 25 is spoken of again."""
    alarm = Alarm()
    first = [said(alarm, index, 64.0, 64.0) for index in range(24)]
    assert said(alarm, 24, 64.0, 64.0, overflow=False) == []
    second = [said(alarm, index, 64.0, 64.0) for index in range(25, 49)]
    assert not any(first + second)
    assert len(said(alarm, 49, 64.0, 64.0)) == 1
    said(alarm, 50, 64.0, 64.0, overflow=False)
    assert sum(len(said(alarm, index, 64.0, 64.0)) for index in range(51, 76)) == 1


@pytest.mark.parametrize(
    ("names", "skipped", "expected"),
    [
        ([f"w{n}" for n in range(8)], (False, True), "'w4' and 3 more"),
        ([], (True,), "none on this rank"),
        (["w5"], (False,), "unknown (no step was asked for)"),
        (["w5"], (), "unknown (no step was asked for)"),
    ],
)
def test_the_names_are_those_of_the_last_update(names: list[str], skipped: tuple[bool, ...], expected: str) -> None:
    """Five and the number of the others; none where another rank overflowed; without a skip they are of another row."""
    alarm, messages = Alarm(), []
    for index in range(25):
        update = ScaleUpdate(index, 64.0, 64.0, True, skipped)
        messages += list(alarm.messages(update, lambda: names))
    assert expected in messages[0]
    assert "'w5'" not in messages[0]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([torch.optim.SGD], "Not finite at the last skip: 'w0'."),
        ([torch.optim.SGD, torch.optim.Adam], "Not finite at the last skip: 'SGD: w0', 'Adam: w1'."),
        ([torch.optim.SGD, torch.optim.SGD], "Not finite at the last skip: 'SGD 1: w0', 'SGD 2: w1'."),
    ],
)
def test_whose_parameter_it_is_stands_before_its_name(kinds: list[Any], expected: str) -> None:
    """Where several optimizers are stepped: by class, and by number where two of one class were skipped."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in kinds]
    optimizers = [kind([(f"w{n}", parameters[n])], lr=0.1) for n, kind in enumerate(kinds)]
    scaler = GradScaler(2.0**60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.grad = torch.tensor([math.nan])
                scaler.step(optimizer)
            scaler.update()
    (message,) = [str(one.message) for one in caught]
    assert expected in message


def test_of_two_optimizers_the_one_that_was_skipped_is_named() -> None:
    """One of the two lands each time: its parameters are not told of, and the other's are told with its class."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameters[0]]), torch.optim.Adam([parameters[1]])]
    scaler = GradScaler(2.0**60)
    with pytest.warns(UserWarning, match="at the last skip: 'Adam: group 0, parameter 0'\\."):
        for _ in range(25):
            for value, parameter, optimizer in zip((1.0, math.inf), parameters, optimizers, strict=True):
                parameter.grad = torch.tensor([value])
                scaler.step(optimizer)
            scaler.update()
