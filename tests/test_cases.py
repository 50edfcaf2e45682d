"""Small inputs that go wrong elsewhere, each with the right answer. Several ranks have tests of their own."""

import math
import pickle
import warnings
from typing import Any

import pytest
import torch

from lucid.amp import GradScaler


def weight(*gradient: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A parameter of zeros with this gradient."""
    made = torch.nn.Parameter(torch.zeros(len(gradient), dtype=dtype))
    made.grad = torch.tensor(gradient, dtype=dtype)
    return made


def sgd(*parameters: torch.nn.Parameter, **settings: Any) -> torch.optim.SGD:
    """Gradient descent with a learning rate of 1."""
    return torch.optim.SGD(parameters, lr=1.0, **settings)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fused", [False, True])
def test_1_a_collapse_does_not_destroy_the_good_step_after_it(fused: bool) -> None:
    """300 NaNs end at 2⁻¹²⁶ with two warnings; a scaled gradient of 3 · 2⁻¹²⁶ then lands as 3."""
    held, scaler = weight(0.0), GradScaler()
    optimizer = sgd(held, fused=fused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            held.grad = torch.tensor([math.nan])
            scaler.step(optimizer)
            scaler.update()
    assert ["below 1" in str(warning.message) for warning in caught] == [True, False]
    assert "25 updates in a row" in str(caught[1].message)
    assert scaler.get_scale() == 2.0**-126
    held.grad = torch.tensor([3.0 * 2.0**-126])
    scaler.step(optimizer)
    assert held.grad.item() == 3.0
    assert held.item() == -3.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:the scale fell below 1")
def test_2_the_quotient_may_overflow_where_the_gradient_does_not(fused: bool) -> None:
    """3e38 / 0.25 is inf: skipped, the parameter unchanged, the scale 0.125."""
    held, scaler = weight(3e38), GradScaler(0.25)
    optimizer = sgd(held, fused=fused)
    scaler.step(optimizer)
    scaler.update()
    assert held.grad.item() == math.inf
    assert held.item() == 0.0
    assert scaler.get_scale() == 0.125


def test_3_a_refusal_divides_nothing_however_often_it_is_tried() -> None:
    """A complex gradient beside a float32 one: refused twice with 16 untouched; without it 16 / 4 = 4."""
    real, imaginary = weight(16.0), torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    imaginary.grad = torch.tensor([16 + 0j])
    optimizer, scaler = sgd(real, imaginary), GradScaler(4.0)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="complex64"):
            scaler.unscale_(optimizer)
        assert real.grad.item() == 16.0
    imaginary.grad = None
    scaler.unscale_(optimizer)
    assert real.grad.item() == 4.0


def test_4_one_stray_half_parameter_under_a_fused_optimizer() -> None:
    """ValueError that names it, all gradients untouched; update() and pickling afterwards work."""
    named = [("a", weight(8.0)), ("b", weight(8.0, dtype=torch.float16)), ("c", weight(8.0))]
    optimizer, scaler = torch.optim.AdamW(named, fused=True), GradScaler(4.0)
    with pytest.raises(ValueError, match=r"'b' \(shape \(1,\), torch\.float16"):
        scaler.step(optimizer)
    assert [parameter.grad.item() for _, parameter in named] == [8.0] * 3
    assert not optimizer.state
    pickle.dumps(scaler)
    scaler.update()
    pickle.dumps(scaler)


@pytest.mark.parametrize("value", [3.0, math.inf])
def test_5_one_parameter_in_two_optimizers(value: float) -> None:
    """3 · 65536 is divided once, to 3; were it inf, both would skip."""
    held, scaler = weight(value * 65536.0), GradScaler()
    optimizers = [sgd(held), sgd(held)]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert held.grad.item() == value
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.step_was_skipped(optimizer) for optimizer in optimizers] == [value == math.inf] * 2


def test_6_a_positional_closure_trains_on_nothing() -> None:
    """RuntimeError; the parameter does not move, and the closure is not called."""
    held, scaler = weight(3.2 * 65536), GradScaler()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(sgd(held), lambda: pytest.fail("the closure was called"))
    assert held.item() == 0.0
    assert held.grad.item() == torch.tensor(3.2 * 65536).item()


def test_7_a_half_loss_is_scaled_in_float32() -> None:
    """3 · 65536 = 196608, in float32, and not inf."""
    scaled = GradScaler().scale(torch.tensor([3.0], dtype=torch.float16))
    assert (scaled.dtype, scaled.tolist()) == (torch.float32, [196608.0])


def test_8_a_fused_skip_is_a_skip() -> None:
    """The hook does not run, the state is empty, the finite gradient holds its true value."""
    good, bad, ran = weight(8.0), weight(math.inf), []
    optimizer, scaler = torch.optim.AdamW([good, bad], fused=True), GradScaler(4.0)
    optimizer.register_step_post_hook(lambda *_: ran.append(True))
    scaler.step(optimizer)
    assert ran == []
    assert not optimizer.state
    assert good.grad.item() == 2.0
    assert scaler.step_was_skipped(optimizer)


def test_9_fifty_optimizers_made_and_freed() -> None:
    """None is refused; the inf of the third counts at the update."""
    scaler = GradScaler(4.0)
    for number in range(50):
        scaler.unscale_(sgd(weight(math.inf if number == 2 else 8.0)))
    scaler.update()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("scale", [..., 0, -4, math.nan, math.inf, "8"], ids=str)
def test_10_half_a_checkpoint_is_none(scale: Any) -> None:
    """Without its growth_interval (here ...), or with a scale that is none: refused, the scaler as before."""
    scaler = GradScaler(16.0, 3.0, 0.25, 9)
    state = {"scale": 2.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 1}
    if scale is ...:
        del state["growth_interval"]
    else:
        state["scale"] = scale
    before = repr(scaler)
    with pytest.raises((ValueError, TypeError), match="growth_interval" if scale is ... else "scale"):
        scaler.load_state_dict(state)
    assert repr(scaler) == before


def test_13_a_warm_up_waits_for_the_first_step_that_lands() -> None:
    """After three skips the learning rate is still the first one, and PyTorch has not warned."""
    held, scaler = weight(math.inf), GradScaler()
    optimizer = sgd(held)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    for _ in range(3):
        held.grad = torch.tensor([math.inf])
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped(optimizer):
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("fused", [False, True])
def test_14_a_float64_gradient_keeps_its_digits(fused: bool) -> None:
    """1 / 3 = 0.3333333333333333, not the float32 0.33333334."""
    held = weight(1.0, dtype=torch.float64)
    GradScaler(3.0).step(sgd(held, fused=fused))
    assert held.grad.item() == 0.3333333333333333
    assert held.item() == -0.3333333333333333


def test_15_a_sparse_gradient_overflows_in_its_sum() -> None:
    """Indices 1 and 1 with 3e38 and 3e38: their sum is inf; skipped."""
    held = torch.nn.Parameter(torch.zeros(3))
    held.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3e38, 3e38]), (3,), check_invariants=True)
    optimizer, scaler = sgd(held), GradScaler(1.0)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert held.tolist() == [0.0] * 3
