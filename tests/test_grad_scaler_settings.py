"""update(new_scale), getters, setters, repr: what is asked for is in force, and what is wrong changes nothing."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from weights import sgd, trained

from lucid.amp import GradScaler
from lucid.amp._division import Factors

DEFAULTS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


@pytest.mark.parametrize(
    "new_scale",
    [8, 8.0, np.float32(8), torch.tensor(8.0), torch.tensor([8]), torch.tensor([[8.0]], dtype=torch.float64)],
    ids=repr,
)
def test_a_new_scale_is_set_and_restarts_the_count(new_scale: Any) -> None:
    """A number or a one-element tensor; also after an overflow the scale is what was asked for."""
    for gradient in (1.0, math.inf):
        scaler = GradScaler(4.0, growth_interval=2)
        trained(1.0, scaler=scaler)
        _, optimizer = sgd(gradient)
        scaler.step(optimizer)
        scaler.update(new_scale)
        assert scaler.get_scale() == 8.0
        assert type(scaler.get_scale()) is float
        assert scaler.state_dict()["_growth_tracker"] == 0


@pytest.mark.parametrize(
    ("new_scale", "error"),
    [
        *[(value, ValueError) for value in (0.0, -4.0, math.nan, math.inf, 2.0**-127, 2.0**128)],
        *[(value, TypeError) for value in ("8", True, 1j, [8.0], np.ones(1))],
        (torch.tensor(math.nan), ValueError),
        (torch.ones(2), ValueError),
        (torch.zeros(0), ValueError),
        (torch.tensor(True), TypeError),
        (torch.tensor(1j), TypeError),
    ],
    ids=repr,
)
def test_a_bad_new_scale_changes_nothing(new_scale: Any, error: type[Exception]) -> None:
    """It is named, and the iteration goes on as if update had not been called."""
    _, optimizer = sgd()
    scaler = GradScaler(4.0)
    scaler.unscale_(optimizer)
    before = scaler.state_dict()
    with pytest.raises(error, match="new_scale"):
        scaler.update(new_scale)
    assert scaler.state_dict() == before
    assert scaler.last_update is None
    with pytest.raises(RuntimeError, match="already ran"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("refreshed", [0, 1])
def test_an_interrupted_change_of_scale_is_made_good_by_the_next(
    refreshed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes before the tensors that multiply are refreshed, or those that divide: 8 over 8 is 1 in the end."""
    scaler, left, refresh = GradScaler(4.0), iter(range(refreshed)), Factors.set
    trained(1.0, scaler=scaler)

    def interrupted(factors: Factors, value: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        refresh(factors, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Factors, "set", interrupted)
        scaler.update(8.0)
    scaler.update(8.0)
    weight, optimizer = sgd(8.0)
    assert (scaler.get_scale(), scaler.scale(torch.ones(())).item()) == (8.0, 8.0)
    scaler.step(optimizer)
    assert weight.tolist() == [-1.0] * 3


def test_setters_set_what_the_getters_tell_and_the_next_update_uses() -> None:
    """A growth interval that was shortened below the count grows at the next update."""
    scaler = GradScaler(4.0)
    trained(*[1.0] * 5, scaler=scaler)
    scaler.set_growth_factor(8.0)
    scaler.set_growth_interval(3)
    scaler.set_backoff_factor(0.125)
    assert (scaler.get_growth_factor(), scaler.get_growth_interval(), scaler.get_backoff_factor()) == (8.0, 3, 0.125)
    assert trained(1.0, math.inf, scaler=scaler)[1] == [32.0, 4.0]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("growth_factor", 1.0, ValueError),
        ("growth_factor", "2", TypeError),
        ("backoff_factor", 0.0, ValueError),
        ("backoff_factor", True, TypeError),
        ("growth_interval", 0, ValueError),
        ("growth_interval", 2.5, TypeError),
    ],
)
def test_a_bad_setting_is_refused_and_changes_nothing(
    name: str, value: Any, error: type[Exception], enabled: bool
) -> None:
    """Setters validate as the constructor does."""
    scaler = GradScaler(enabled=enabled)
    with pytest.raises(error, match=name):
        getattr(scaler, f"set_{name}")(value)
    assert getattr(scaler, f"get_{name}")() == DEFAULTS[name]


def test_repr_tells_scale_count_and_settings_in_one_line() -> None:
    """As a log or a notebook shows it."""
    scaler = GradScaler(8.0, 4.0, 0.25, 7)
    scaler.update()
    text = repr(scaler)
    for part in (
        "GradScaler",
        "scale=8.0",
        "growth_tracker=1",
        "growth_factor=4.0",
        "backoff_factor=0.25",
        "=7",
        "True",
    ):
        assert part in text
    assert "\n" not in text


def test_scale_is_kept_as_float32() -> None:
    """get_scale() tells the rounded number that the division uses."""
    assert GradScaler(0.1).get_scale() == float(np.float32(0.1))
    scaler = GradScaler(1000.0, growth_factor=1.1, growth_interval=1)
    scaler.update()
    assert scaler.get_scale() == float(np.float32(1100.0))
    scaler.update(0.1)
    assert scaler.get_scale() == float(np.float32(0.1))
