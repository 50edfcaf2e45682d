"""Ready → unscaled → stepped, through the scaler: what is legal, what is refused, and what a refusal leaves."""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lucid.amp import GradScaler


def weight(gradient: float = 12.0, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A parameter with a gradient."""
    made = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    made.grad = torch.full((3,), gradient, dtype=dtype)
    return made


class Duck:
    """Gradient descent without ``torch.optim``."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
        self.steps = 0

    def step(self, *_: Any, **__: Any) -> str:
        """Descend."""
        self.steps += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad
        return "stepped"


class Equal(Duck):
    """Equal to all others, without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Say yes."""
        return True


class Slotted:
    """Cannot be referred to weakly."""

    __slots__ = ("param_groups", "steps")

    __init__ = Duck.__init__  # type: ignore[assignment]
    step = Duck.step  # type: ignore[assignment]


class Own(torch.optim.Optimizer):
    """A user's own optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Descend."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


KINDS: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=1.0, fused=True),
    "own": Own,
    "duck": Duck,
    "equal": Equal,
    "slotted": Slotted,
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[[list[torch.nn.Parameter]], Any]:
    """An optimizer of each kind, with a learning rate of 1."""
    return KINDS[request.param]


def test_the_way_through_an_iteration(kind: Any) -> None:
    """unscale_, step, update, twice over: divided once each time."""
    held, scaler = weight(), GradScaler(4.0)
    optimizer = kind([held])
    for iteration in (1, 2):
        scaler.unscale_(optimizer)
        assert held.grad.tolist() == [3.0] * 3
        scaler.step(optimizer)
        assert held.tolist() == [-3.0 * iteration] * 3
        scaler.update()
        held.grad = torch.full((3,), 12.0)


def test_what_is_refused_before_update(kind: Any) -> None:
    """unscale_ twice, unscale_ after step, step twice: RuntimeError, and the gradients stay."""
    held, scaler = weight(), GradScaler(4.0)
    optimizer = kind([held])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) already ran"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) came after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) already ran"):
        scaler.step(optimizer)
    assert held.grad.tolist() == [3.0] * 3
    assert held.tolist() == [-3.0] * 3


def test_two_optimizers_of_one_kind_are_two(kind: Any) -> None:
    """An overflow skips only its own optimizer's step; the update backs off for all."""
    good, bad, scaler = weight(), weight(math.inf), GradScaler(4.0)
    first, second = kind([good]), kind([bad])
    for optimizer in (first, second):
        scaler.step(optimizer)
    assert (good.tolist(), bad.tolist()) == ([-3.0] * 3, [0.0] * 3)
    assert (scaler.step_was_skipped(first), scaler.step_was_skipped(second)) == (False, True)
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_update_gives_an_iteration_up(kind: Any) -> None:
    """After unscale_ without a step the next iteration may unscale again; an overflow found there counts."""
    held, scaler = weight(math.nan), GradScaler(4.0)
    optimizer = kind([held])
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    held.grad = torch.full((3,), 12.0)
    scaler.unscale_(optimizer)
    assert held.grad.tolist() == [6.0] * 3


def test_fifty_optimizers_made_and_freed(kind: Any) -> None:
    """None is refused for another's stage at its address; the overflow of a freed one still counts."""
    scaler = GradScaler(4.0)
    for number in range(50):
        scaler.unscale_(kind([weight(math.inf if number == 2 else 12.0)]))
        gc.collect(0)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert scaler.last_update.overflow


# Closures.


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure_is_refused_in_either_place(kind: Any, how: str, unscaled: bool) -> None:
    """RuntimeError, nothing changed, and a step without it goes on."""
    held, scaler = weight(), GradScaler(4.0)
    optimizer = kind([held])
    if unscaled:
        scaler.unscale_(optimizer)
    before = held.grad.clone()
    with pytest.raises(RuntimeError, match="closure"):
        if how == "positional":
            scaler.step(optimizer, lambda: pytest.fail("the closure was called"))
        else:
            scaler.step(optimizer, closure=lambda: pytest.fail("the closure was called"))
    assert torch.equal(held.grad, before)
    assert held.tolist() == [0.0] * 3
    scaler.step(optimizer)
    assert held.tolist() == [-3.0] * 3


def test_none_is_no_closure(kind: Any) -> None:
    """Trainers pass it, in either place."""
    held, scaler = weight(), GradScaler(4.0)
    optimizer = kind([held])
    scaler.step(optimizer, None)
    scaler.update()
    scaler.step(optimizer, closure=None)
    assert held.tolist() == [-3.75] * 3  # 3, then 3 / 4


# The order of errors.


def test_closure_then_stage_then_dtype() -> None:
    """Of several errors the first in this order is raised."""
    held, half, scaler = weight(), weight(dtype=torch.float16), GradScaler(4.0)
    optimizer = Duck([held])
    scaler.step(optimizer)
    optimizer.param_groups[0]["params"].append(half)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(RuntimeError, match="already ran"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="came after"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer)


def test_gradients_that_are_unscaled_are_not_looked_at_again() -> None:
    """Step after unscale_ uses them as they are, even one that was refused since."""
    held, scaler = weight(), GradScaler(4.0)
    optimizer = Duck([held])
    scaler.unscale_(optimizer)
    optimizer.param_groups[0]["params"].append(weight(5.0, torch.float16))
    scaler.step(optimizer)
    assert optimizer.steps == 1
    assert optimizer.param_groups[0]["params"][1].tolist() == [-5.0] * 3


# Between unscale_ and step.


def test_a_gradient_replaced_after_unscale_is_used_as_it_is(kind: Any) -> None:
    """The stage is the optimizer's: step divides nothing."""
    held, scaler = weight(), GradScaler(4.0)
    optimizer = kind([held])
    scaler.unscale_(optimizer)
    held.grad = torch.full((3,), 7.0)
    scaler.step(optimizer)
    assert held.tolist() == [-7.0] * 3


def test_an_overflow_found_by_unscale_skips_whatever_is_mended_after_it(kind: Any) -> None:
    """The overflow is recorded for the optimizer; a gradient that was replaced changes nothing."""
    held, scaler = weight(math.inf), GradScaler(4.0)
    optimizer = kind([held])
    scaler.unscale_(optimizer)
    held.grad = torch.zeros(3)
    assert scaler.step(optimizer) is None
    assert scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, torch.float8_e4m3fn])
def test_a_gradient_that_came_after_unscale_does_not_disturb_a_skip(dtype: torch.dtype) -> None:
    """Of a dtype that would have been refused: the overflow that unscale_ found skips the step all the same."""
    held, late, scaler = weight(math.inf), torch.nn.Parameter(torch.zeros(3).to(dtype)), GradScaler(4.0)
    optimizer = Duck([held, late])
    scaler.unscale_(optimizer)
    late.grad = torch.ones(3).to(dtype)
    assert scaler.step(optimizer) is None
    assert scaler.step_was_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_a_parameter_group_added_in_mid_training() -> None:
    """Its gradients take part from the next unscale_ on."""
    first, second, scaler = weight(), weight(), GradScaler(4.0)
    optimizer = torch.optim.SGD([first], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.add_param_group({"params": [second], "lr": 2.0})
    first.grad = torch.full((3,), 12.0)
    scaler.step(optimizer)
    assert (first.tolist(), second.tolist()) == ([-6.0] * 3, [-6.0] * 3)


# Optimizers that raise.


class Raising(Duck):
    """Raises at its first step, when it has seen the gradients."""

    def step(self, *_: Any, **__: Any) -> str:
        """Raise once."""
        self.steps += 1
        if self.steps == 1:
            raise OSError("the disk is full")
        return super().step()


@pytest.mark.parametrize("unscaled", [False, True])
def test_an_optimizer_that_raised_can_be_stepped_again(unscaled: bool) -> None:
    """Its own error comes through; the second try does not divide again, and answers stay as they were."""
    held, scaler = weight(), GradScaler(4.0)
    optimizer = Raising([held])
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(OSError, match="disk"):
        scaler.step(optimizer)
    assert held.grad.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="never stepped"):
        scaler.step_was_skipped(optimizer)
    assert scaler.step(optimizer) == "stepped"
    assert held.tolist() == [-3.0] * 3
    assert scaler.step_was_skipped(optimizer) is False


@pytest.mark.parametrize("rounds", [0, 3])
def test_an_update_inside_a_step_ends_the_iteration(rounds: int) -> None:
    """A hook after the step may call update(): the step landed, and the optimizer is ready again, at any iteration."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler(4.0)
    for _ in range(rounds):
        weight.grad = torch.tensor([8.0])
        scaler.step(optimizer)
        scaler.update()
    optimizer.register_step_post_hook(lambda *_: scaler.update())
    for call in range(1, 4):
        weight.grad = torch.tensor([8.0])
        scaler.step(optimizer)
        assert weight.item() == -2.0 * (rounds + call)
        assert not scaler.step_was_skipped(optimizer)
        assert not scaler._stages.in_progress()
    assert scaler.state_dict()["_growth_tracker"] == rounds + 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_new_backward_after_an_optimizer_raised_is_divided(fused: bool) -> None:
    """A loop that was interrupted and runs again: its gradients are new, and are not used 65536 times too big."""
    held, scaler = torch.nn.Parameter(torch.zeros(2**15)), GradScaler()
    optimizer = torch.optim.SGD([held], lr=1.0, fused=fused)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for gradient, skipped in ((3.0, False), (math.inf, True)):
        held.grad = torch.full_like(held, 5.0 * 2**16)
        handle = optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
        handle.remove()
        assert held.grad.eq(5.0).all()
        held.grad = torch.full_like(held, gradient * 2**16)
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) is skipped
        assert held.eq(-3.0).all()
        scaler.update()
        assert scaler.get_scale() == (2.0**15 if skipped else 2.0**16)


def test_an_iteration_with_an_optimizer_that_raised_can_be_given_up() -> None:
    """update() makes it ready; it counts as overflow-free."""
    held, scaler = weight(), GradScaler(4.0, growth_interval=1)
    optimizer = Raising([held])
    with pytest.raises(OSError, match="disk"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.unscale_(optimizer)


def test_the_same_optimizer_through_two_scalers() -> None:
    """Each scaler has its own stages; PyTorch's users do so for two losses on two scales."""
    held, first, second = weight(), GradScaler(4.0), GradScaler(2.0)
    optimizer = Duck([held])
    first.unscale_(optimizer)
    second.unscale_(optimizer)
    assert held.grad.tolist() == [1.5] * 3
    with pytest.raises(RuntimeError, match="already ran"):
        first.unscale_(optimizer)
