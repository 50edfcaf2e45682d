"""A disabled scaler is a transparent pass-through that keeps its settings."""

import json
import math
from typing import Any

import pytest
import torch

from lucid.amp import GradScaler


def off(**settings: Any) -> GradScaler:
    """A disabled scaler."""
    return GradScaler(enabled=False, **settings)


def sgd(gradient: float, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A weight with a gradient, and its optimizer."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    weight.grad = torch.full((2,), gradient, dtype=dtype)
    return weight, torch.optim.SGD([weight], lr=1.0)


@pytest.mark.parametrize(
    "outputs", [torch.ones(2), [torch.ones(())], {"a": 3}, "no tensor", None, iter([torch.ones(())])], ids=type
)
def test_scale_returns_its_input_unchanged(outputs: Any) -> None:
    """The very object, whatever it is."""
    assert off().scale(outputs) is outputs


@pytest.mark.parametrize("gradient", [12.0, math.inf])
def test_step_calls_the_optimizer_directly(gradient: float) -> None:
    """Nothing is divided and nothing is judged: a float16 weight and an inf are the user's."""
    for dtype in (torch.float32, torch.float16):
        weight, optimizer = sgd(gradient, dtype)
        off().step(optimizer)
        assert weight.tolist() == [-gradient] * 2
        assert weight.grad.tolist() == [gradient] * 2


def test_a_closure_is_handed_on_and_its_value_returned() -> None:
    """As keyword and positional; LBFGS needs one."""
    for place in ("positional", "keyword"):
        weight, optimizer = sgd(1.0)
        calls = []

        def closure(calls: list[int] = calls) -> float:
            calls.append(1)
            return 7.0

        result = off().step(optimizer, closure) if place == "positional" else off().step(optimizer, closure=closure)
        assert (result, calls) == (7.0, [1])
        assert weight.tolist() == [-1.0] * 2


def test_stages_do_not_exist() -> None:
    """unscale_ does nothing, in any order and any number; step may be called again and again."""
    weight, optimizer = sgd(12.0)
    scaler = off()
    for _ in range(2):
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [12.0] * 2
    assert weight.tolist() == [-48.0] * 2
    scaler.unscale_(object())


def test_update_is_a_no_op() -> None:
    """Nothing moves, nothing is recorded, no hook runs, nothing is validated."""
    scaler = off(init_scale=4.0, growth_interval=1)
    scaler.register_update_hook(lambda *_: pytest.fail("a hook ran"))
    before = scaler.state_dict()
    for arguments in ((), (8.0,), (-1.0,), ("no number",)):
        scaler.update(*arguments)
    assert scaler.state_dict() == before
    assert scaler.last_update is None


def test_no_observer_hears_anything() -> None:
    """Neither of outputs nor of steps."""
    scaler = off()
    scaler._observe_scale(lambda *_: pytest.fail("observed"))
    scaler._observe_skip(lambda *_: pytest.fail("observed"))
    scaler.scale(torch.ones(()))
    scaler.step(sgd(math.inf)[1])


def test_no_step_was_skipped() -> None:
    """False after each step, so that a bfloat16 run's scheduler moves; before it the usual error."""
    _, optimizer = sgd(math.inf)
    scaler = off()
    with pytest.raises(RuntimeError, match="never stepped"):
        scaler.step_was_skipped(optimizer)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) is False


def test_the_scale_that_applies_is_one() -> None:
    """get_scale() tells the factor; the scale itself is kept for later."""
    scaler = off(init_scale=4.0)
    assert scaler.get_scale() == 1.0
    assert scaler.is_enabled() is False
    assert scaler.state_dict()["scale"] == 4.0


def test_settings_can_be_read_and_set() -> None:
    """On a disabled scaler too."""
    scaler = off()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)


def test_a_run_that_goes_to_bfloat16_and_back_keeps_its_scale() -> None:
    """float16 → checkpoint → disabled → checkpoint → float16: scale, count and settings are those of before."""
    first = GradScaler(8.0, 4.0, 0.25, 7)
    first.update()
    state = first.state_dict()
    second, third = off(), GradScaler()
    second.load_state_dict(json.loads(json.dumps(state)))
    second.update()
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert third.state_dict() == state


def test_it_ignores_the_empty_state_of_a_disabled_scaler_of_pytorch() -> None:
    """{} changes nothing; anything else is validated as ever."""
    scaler = off(init_scale=4.0)
    before = scaler.state_dict()
    scaler.load_state_dict({})
    for wrong, error in ((None, TypeError), ([], TypeError), ({"scale": 1.0}, ValueError)):
        with pytest.raises(error):
            scaler.load_state_dict(wrong)
    assert scaler.state_dict() == before


def test_clipping_is_exactly_that_of_pytorch() -> None:
    """Norm 12·√2 clipped to 1, without a division by any scale."""
    weight, optimizer = sgd(12.0)
    norm = off().clip_grad_norm_(optimizer, 1.0)
    twin = torch.nn.Parameter(torch.zeros(2))
    twin.grad = torch.full((2,), 12.0)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_([twin], 1.0))
    assert torch.equal(weight.grad, twin.grad)


def test_clipping_what_is_no_optimizer_is_refused() -> None:
    """PyTorch's habit, the parameters in the optimizer's place, is a TypeError and no silent norm of nothing."""
    model = torch.nn.Linear(2, 2)
    for wrong in (model, model.parameters(), None):
        with pytest.raises(TypeError, match=f"param_groups and step.*{type(wrong).__name__}"):
            GradScaler(enabled=False).clip_grad_norm_(wrong, 1.0)
