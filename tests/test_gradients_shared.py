"""No gradient is divided twice in an iteration: shared parameters, one memory, wrappers, views and overlaps."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid.amp import GradScaler, _memory


def parameter(gradient: Tensor) -> torch.nn.Parameter:
    """A parameter that holds this gradient."""
    made = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    made.grad = gradient
    return made


def sgd(*parameters: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Gradient descent with a learning rate of 1."""
    return torch.optim.SGD(parameters, lr=1.0)


class Wrapper:
    """A thin wrapper around an optimizer, as many trainers put one there."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        """Those of the optimizer inside."""
        return self.inner.param_groups

    def step(self) -> Any:
        """Step the optimizer inside."""
        return self.inner.step()


@pytest.mark.parametrize(
    "calls", [("unscale_", "unscale_"), ("unscale_", "step"), ("step", "unscale_"), ("step", "step")]
)
def test_a_shared_parameter_is_divided_once(calls: tuple[str, str]) -> None:
    """Two optimizers over one parameter, in any way: gradient 12 at scale 4 is 3."""
    scaler, shared = GradScaler(4.0), parameter(torch.full((3,), 12.0))
    for call in calls:
        getattr(scaler, call)(sgd(shared))
    assert shared.grad.tolist() == [3.0] * 3
    assert shared.tolist() == [-3.0 * calls.count("step")] * 3


@pytest.mark.parametrize("twin", [False, True])
def test_in_every_iteration_a_shared_gradient_is_divided_once(twin: bool) -> None:
    """Two optimizers of one parameter, or of one memory, three iterations: 12 / 4 = 3 in each."""
    scaler, first = GradScaler(4.0), parameter(torch.zeros(2))
    second = parameter(torch.zeros(2)) if twin else first
    for _ in range(3):
        first.grad = torch.full((2,), 12.0)
        second.grad = first.grad.detach() if twin else first.grad
        for one in (first, second):
            scaler.unscale_(sgd(one))
        assert first.grad.tolist() == [3.0, 3.0]
        scaler.update()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_an_overflow_of_a_shared_parameter_counts_for_each(scale: float, bad: float) -> None:
    """The second optimizer meets a divided gradient and still judges it: both skip."""
    scaler, shared, own = GradScaler(scale), parameter(torch.tensor([12.0, bad])), parameter(torch.tensor([12.0]))
    first, second = sgd(shared), sgd(own, shared)
    scaler.unscale_(first)
    for optimizer in (second, first):
        scaler.step(optimizer)
    assert [scaler.step_was_skipped(first), scaler.step_was_skipped(second)] == [True, True]
    assert own.grad.tolist() == [12.0 / scale]
    scaler.update()
    assert scaler.last_update.skipped == (True, True)


def test_a_third_optimizer_without_it_steps() -> None:
    """Only those that hold the overflow skip."""
    scaler, shared, own = GradScaler(4.0), parameter(torch.tensor([math.inf])), parameter(torch.tensor([12.0]))
    optimizers = [sgd(shared), sgd(shared, own), sgd(own)]
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True, False]
    assert own.item() == -3.0


def test_optimizers_that_share_nothing_are_told_apart_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many optimizers in one iteration each is looked up, and compared with no other's gradients one by one."""
    buffer = torch.full((40,), 12.0)
    optimizers = [sgd(parameter(buffer[begin : begin + 4])) for begin in range(0, 40, 4)]
    scaler = GradScaler(4.0)
    monkeypatch.setattr(_memory, "region", None)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert buffer.eq(3.0).all()
    monkeypatch.undo()
    twin = sgd(parameter(buffer[4:8]))
    scaler.step(twin)
    assert buffer.eq(3.0).all()
    with pytest.raises(ValueError, match="overlap in part"):
        scaler.step(sgd(parameter(buffer[6:10])))


def test_a_wrapper_of_an_unscaled_optimizer_divides_nothing() -> None:
    """unscale_ on the inner one, step on the wrapper: divided once, and an overflow still skips."""
    scaler, weight = GradScaler(4.0), parameter(torch.full((3,), 12.0))
    inner = sgd(weight)
    scaler.unscale_(inner)
    scaler.step(Wrapper(inner))
    assert weight.tolist() == [-3.0] * 3
    scaler.update()
    weight.grad = torch.full((3,), math.inf)
    scaler.unscale_(inner)
    scaler.step(Wrapper(inner))
    assert weight.tolist() == [-3.0] * 3


def test_one_gradient_in_two_parameters_is_divided_once() -> None:
    """In one optimizer and in two."""
    for split in (False, True):
        gradient = torch.full((3,), 12.0)
        pair, scaler = [parameter(gradient), parameter(gradient)], GradScaler(4.0)
        for optimizer in [sgd(pair[0]), sgd(pair[1])] if split else [sgd(*pair)]:
            scaler.unscale_(optimizer)
        assert gradient.tolist() == [3.0] * 3


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_two_tensors_of_one_memory_count_as_one(split: bool, shape: tuple[int, ...]) -> None:
    """Different objects of the same address, shape and strides are divided once."""
    memory = torch.full((6,), 12.0)
    pair, scaler = [parameter(memory.view(shape)), parameter(memory.view(shape))], GradScaler(4.0)
    assert pair[0].grad is not pair[1].grad
    for optimizer in [sgd(pair[0]), sgd(pair[1])] if split else [sgd(*pair)]:
        scaler.unscale_(optimizer)
    assert memory.tolist() == [3.0] * 6


def test_of_two_tensors_of_one_memory_one_may_go() -> None:
    """The gradient that was divided first is freed, the other one is still known."""
    memory = torch.full((6,), 12.0)
    pair, scaler = [parameter(memory.view(6)), parameter(memory.view(6))], GradScaler(4.0)
    scaler.unscale_(sgd(*pair))
    pair[0].grad = None
    scaler.unscale_(sgd(pair[1]))
    assert memory.tolist() == [3.0] * 6


def test_empty_gradients_are_no_same_memory() -> None:
    """Two empty gradients may have one address; nothing is to be divided, and nothing is refused."""
    pair = [parameter(torch.zeros(0)), parameter(torch.zeros(0, 3))]
    full = parameter(torch.full((2,), 12.0))
    GradScaler(4.0).step(sgd(*pair, full))
    assert full.tolist() == [-3.0] * 2


def test_a_fresh_backward_is_divided_again() -> None:
    """After zero_grad() a new tensor comes: it is scaled, and another optimizer divides it."""
    weight, scaler = torch.nn.Parameter(torch.zeros(3)), GradScaler(4.0)
    for _ in range(3):
        optimizer = sgd(weight)
        optimizer.zero_grad()
        scaler.scale((weight * 5.0).sum()).backward()
        scaler.unscale_(optimizer)
        assert weight.grad.tolist() == [5.0] * 3


def test_a_gradient_that_was_kept_is_divided_again_after_update() -> None:
    """An iteration ends with update: the same tensor is scaled anew, as zero_grad(set_to_none=False) leaves it."""
    weight, scaler = torch.nn.Parameter(torch.zeros(3)), GradScaler(4.0)
    optimizer = sgd(weight)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale((weight * 5.0).sum()).backward()
        scaler.unscale_(optimizer)
        assert weight.grad.tolist() == [5.0] * 3
        scaler.update()


def test_a_gradient_moved_in_memory_hides_no_other() -> None:
    """After ``grad.data = ...`` another gradient may lie where the first one was; it is divided."""
    memory, scaler = torch.full((3,), 12.0), GradScaler(4.0)
    moved, other = parameter(memory.view(3)), torch.nn.Parameter(torch.zeros(3))
    scaler.unscale_(sgd(moved))
    moved.grad.data = moved.grad.data.clone()
    memory.fill_(20.0)
    other.grad = memory.view(3)
    scaler.unscale_(sgd(other))
    assert other.grad.tolist() == [5.0] * 3
    scaler.unscale_(sgd(moved))
    assert moved.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("scale", [4.0, 3.0])
@pytest.mark.parametrize("split", [False, True])
def test_views_of_one_buffer_are_each_divided(split: bool, scale: float) -> None:
    """DDP's buckets: neighbours, and interleaved views, share a storage and no element."""
    buffer = torch.full((4, 6), 12.0)
    flat = buffer.view(-1)
    views = [flat[:6], flat[6:12].view(2, 3), buffer[2:, 0::2], buffer[2:, 1::2]]
    parameters, scaler = [parameter(view) for view in views], GradScaler(scale)
    for optimizer in [sgd(one) for one in parameters] if split else [sgd(*parameters)]:
        scaler.unscale_(optimizer)
    assert flat.tolist() == [12.0 / scale] * 24


OVERLAPS = {
    "two that overlap": lambda buffer: [buffer[:4], buffer[3:7]],
    "one inside the other": lambda buffer: [buffer, buffer[2:4]],
    "the same start": lambda buffer: [buffer[:4], buffer[:2]],
    "a row and a column": lambda buffer: [buffer.view(2, 5)[1], buffer.view(2, 5)[:, 2]],
    "itself": lambda buffer: [buffer.as_strided((3, 3), (2, 1))],
    "itself, turned": lambda buffer: [buffer.as_strided((3, 3), (1, 2))],
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("which", OVERLAPS)
def test_a_partial_overlap_is_refused_before_anything_changes(which: str, split: bool) -> None:
    """Shared elements would be divided twice: a ValueError that names the gradients."""
    buffer, scaler, bystander = torch.full((10,), 12.0), GradScaler(4.0), parameter(torch.full((2,), 12.0))
    parameters = [parameter(view) for view in OVERLAPS[which](buffer)]
    if split and len(parameters) > 1:
        scaler.unscale_(sgd(parameters[0]))
    before = buffer.clone()
    optimizer = sgd(bystander, *parameters[split and len(parameters) > 1 :])
    with pytest.raises(ValueError, match=r"group 0, parameter 1.*overlap.*clone\(\)"):
        scaler.unscale_(optimizer)
    assert torch.equal(buffer, before)
    assert bystander.grad.tolist() == [12.0] * 2
    for one in parameters:
        one.grad = None
    scaler.unscale_(optimizer)
    assert bystander.grad.tolist() == [3.0] * 2


def test_a_refused_gradient_was_not_divided_when_its_twin_is() -> None:
    """A refusal notes nothing: what another optimizer holds afterwards is still scaled."""
    scaler, shared = GradScaler(4.0), parameter(torch.full((3,), 12.0))
    with pytest.raises(ValueError, match="float16"):
        scaler.unscale_(sgd(shared, parameter(torch.ones(2, dtype=torch.float16))))
    scaler.unscale_(sgd(shared))
    assert shared.grad.tolist() == [3.0] * 3


def test_a_parameter_that_is_listed_twice_is_divided_once() -> None:
    """A duck-typed optimizer may list a parameter in two groups."""
    weight = parameter(torch.full((3,), 12.0))

    inner = sgd(weight)
    inner.param_groups[0]["params"] *= 2
    inner.param_groups *= 2
    GradScaler(4.0).unscale_(Wrapper(inner))
    assert weight.grad.tolist() == [3.0] * 3
