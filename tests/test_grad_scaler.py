"""The iteration as the specification tells it: scale, step or skip, update; settings, bounds and warnings."""

import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from duck import Duck, with_grad
from weights import sgd, trained

import lucid.amp
from lucid.amp import GradScaler

DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "enabled": True,
}


def test_the_five_parameters_their_order_and_their_defaults() -> None:
    """Positional exactly as the specification lists them; anything more is keyword-only."""
    parameters = inspect.signature(GradScaler).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(DEFAULTS.items())
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name not in DEFAULTS)


def test_a_fresh_scaler_has_the_defaults() -> None:
    """Each getter tells the specification's default."""
    scaler = GradScaler()
    assert scaler.get_scale() == 65536.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)
    assert scaler.is_enabled() is True


@pytest.mark.parametrize("place", ["cuda", "cpu", "metal", torch.device("cpu")], ids=str)
def test_a_device_in_first_place_is_answered(place: Any) -> None:
    """Who comes from PyTorch is told to drop the device, wherever it stands and whatever comes with it."""
    wrong: Any = GradScaler
    for call in (
        lambda: wrong(place),
        lambda: wrong(place, init_scale=4.0),
        lambda: wrong(device=place),
        lambda: wrong(device=place, init_scale=4.0, enabled=False),
    ):
        with pytest.raises(TypeError, match=r"takes no device, unlike torch\.amp\.GradScaler: drop"):
            call()


def test_a_word_for_a_scale_is_no_device() -> None:
    """By name it is what it is named."""
    with pytest.raises(TypeError, match=r"init_scale must be a real number, got '65536'"):
        GradScaler(init_scale="65536")  # type: ignore[arg-type]


@pytest.mark.parametrize("enabled", [None, "yes", 1.0])
def test_enabled_is_a_bool(enabled: Any) -> None:
    """Anything else is a TypeError with the name."""
    with pytest.raises(TypeError, match="enabled"):
        GradScaler(enabled=enabled)


def test_arguments_of_a_disabled_scaler_are_validated_too() -> None:
    """Always means always."""
    with pytest.raises(ValueError, match="backoff_factor"):
        GradScaler(backoff_factor=1.0, enabled=False)


def test_a_step_is_that_of_plain_training() -> None:
    """Scaled by a power of two and unscaled, the update is exactly the unscaled one: −0.1 − 0.7."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler()
    for gradient in (0.1, 0.7):
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        assert weight.grad.tolist() == [float(np.float32(gradient)) * 65536.0] * 2
        scaler.step(optimizer)
        scaler.update()
    expected = -np.float32(0.1) - np.float32(0.7)
    assert weight.tolist() == [float(expected)] * 2


def test_the_scale_backs_off_and_grows() -> None:
    """The sawtooth of the specification, through real gradients: x is an overflow, interval 2."""
    scaler = GradScaler(16.0, 4.0, 0.25, 2)
    _, scales = trained(1.0, 1.0, math.inf, 1.0, math.nan, 1.0, 1.0, 1.0, scaler=scaler)
    assert scales == [16.0, 64.0, 16.0, 16.0, 4.0, 4.0, 16.0, 16.0]


def test_an_overflow_restarts_the_count() -> None:
    """1999 good updates, an overflow, 1999 more: no growth; one more: growth."""
    scaler = GradScaler()
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1999})
    _, scales = trained(math.inf, scaler=scaler)
    assert scales == [32768.0]
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1998})
    _, scales = trained(1.0, 1.0, scaler=scaler)
    assert scales == [32768.0, 65536.0]


def test_a_skipped_step_moves_no_weight_and_returns_none() -> None:
    """The optimizer is not called; the gradients hold their true values, inf where they were."""
    weight, optimizer = sgd(momentum=0.9)
    weight.grad[1] = math.inf
    scaler = GradScaler(4.0)
    assert scaler.step(optimizer) is None
    assert weight.tolist() == [0.0] * 3
    assert not optimizer.state
    assert weight.grad.tolist() == [3.0, math.inf, 3.0]


def test_step_returns_what_the_optimizer_returned_and_forwards_arguments() -> None:
    """Positional and keyword arguments arrive unchanged."""

    class Recording:
        param_groups: tuple[dict[str, Any], ...] = ({"params": []},)

        def step(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    assert GradScaler().step(Recording(), 3, "a", flag=True) == ((3, "a"), {"flag": True})


def test_step_is_looked_up_when_it_is_called() -> None:
    """A step that was patched on the instance after the scaler was made is the one that is called."""
    weight, optimizer = sgd()
    optimizer.step = lambda: weight.grad.tolist()  # type: ignore[method-assign]
    assert GradScaler(4.0).step(optimizer) == [3.0] * 3


def test_nothing_needs_scale_first() -> None:
    """unscale_, step and update work on a fresh scaler."""
    weight, optimizer = sgd()
    scaler = GradScaler(4.0)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [3.0] * 3
    scaler.step(optimizer)
    scaler.update()
    GradScaler().update()
    assert weight.tolist() == [-3.0] * 3


def test_clipping_between_unscale_and_step() -> None:
    """The specification's second example: step leaves clipped gradients alone."""
    weight, optimizer = sgd(gradient=4.0 * 65536)
    scaler = GradScaler()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    assert norm.item() == pytest.approx(4.0 * 3**0.5)
    clipped = weight.grad.clone()
    scaler.step(optimizer)
    assert torch.equal(weight.grad, clipped)
    assert torch.equal(weight, -clipped)


def test_accumulated_micro_batches_are_divided_together() -> None:
    """Three backwards of 5, each scaled, then one step: 15."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler()
    for _ in range(3):
        scaler.scale((weight * 5.0).sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [-15.0] * 2


@pytest.mark.filterwarnings("default")
def test_a_collapse_is_told_once_and_again_for_a_row() -> None:
    """From 2 on 30 NaNs: one warning at 0.5, one at the 25th skip with the parameter's name; at the caller's line."""
    scaler, weight = GradScaler(2.0), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([("head.weight", weight)], lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(30):
            weight.grad = torch.tensor([1.0, math.nan])
            scaler.step(optimizer)
            scaler.update()
    low, row = (str(warning.message) for warning in caught)
    assert "below 1" in low
    for part in ("25 updates in a row", "since update 0", "'head.weight'"):
        assert part in row
    assert [warning.filename for warning in caught] == [__file__] * 2


def test_a_warning_turned_into_an_error_leaves_the_update_done() -> None:
    """Under ``-W error`` the scale has moved all the same, and every optimizer is ready."""
    _, optimizer = sgd(math.inf)
    scaler = GradScaler(1.0)
    scaler.step(optimizer)
    with pytest.raises(UserWarning, match="below 1"):
        scaler.update()
    assert scaler.get_scale() == 0.5
    scaler.step(optimizer)


def test_the_public_names() -> None:
    """GradScaler, autocast and ScaleUpdate, and where they say that they live."""
    assert sorted(lucid.amp.__all__) == ["GradScaler", "ScaleUpdate", "autocast"]
    for name in ("get_scale", "load_state_dict", "scale", "state_dict", "step", "update", "unscale_"):
        assert callable(getattr(GradScaler, name))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.filterwarnings("default")
def test_a_good_update_ends_the_row_with_and_without_hooks(hooked: bool, recwarn: pytest.WarningsRecorder) -> None:
    """24 skips, a good step, 24 skips from 2¹⁰⁰ down: no warning, whether or not someone hears of each update."""
    scaler, weight = GradScaler(2.0**100), with_grad(torch.zeros(1))
    optimizer = Duck(weight)
    if hooked:
        scaler.register_update_hook(lambda *_: None)
    for index in range(49):
        weight.grad = torch.tensor([0.0 if index == 24 else math.inf])
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.steps == 1
    assert len(recwarn) == 0


@pytest.mark.filterwarnings("error")
def test_a_scale_that_is_set_after_an_overflow_did_not_fall() -> None:
    """update(0.25) after an overflow is what was asked for, and no reason for a warning."""
    scaler, weight = GradScaler(8.0), with_grad(torch.tensor([math.inf]))
    scaler.step(Duck(weight))
    scaler.update(0.25)
    assert scaler.get_scale() == 0.25
