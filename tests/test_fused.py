"""Fused optimizers: called only when the step lands, and true gradients before it, after it and after a raise.

Each test runs twice: with the division inside the optimizer's kernel, and with the division before it.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor
from values import bits, numbers

from lucid.amp import GradScaler, _fused

CLASSES = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.fixture(params=["in the kernel", "before it"], autouse=True)
def in_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where the gradients are divided, whatever their size and the scale."""
    inside: bool = request.param == "in the kernel"
    monkeypatch.setattr(_fused, "saves", lambda *_: inside)
    return inside


@pytest.fixture(params=CLASSES, ids=lambda made: made.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    """A class of optimizers with a fused kernel."""
    return request.param


@pytest.fixture
def make(kind: Any) -> Callable[..., Any]:
    """A fused optimizer of that class."""
    return lambda parameters, **settings: kind(parameters, **{"lr": 0.5, "fused": True} | settings)


def weight(gradient: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.nn.Parameter:
    """A parameter with this gradient."""
    values = torch.as_tensor(gradient, dtype=dtype).to(device, copy=True)
    made = torch.nn.Parameter(torch.ones_like(values))
    made.grad = values
    return made


def counted(optimizer: Any) -> list[str]:
    """What is called of an optimizer's hooks, from now on."""
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    return calls


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_a_factor_that_another_scaler_left_is_refused(make: Callable[..., Any], name: str, unscaled: bool) -> None:
    """Its kernel would divide once more, or leave the step out in silence: nothing happens until it is deleted."""
    parameter = weight([8.0])
    optimizer, scaler = make([parameter]), GradScaler(8.0)
    setattr(optimizer, name, torch.ones(()))
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=rf"{name}.*del optimizer\.{name}"):
        scaler.step(optimizer)
    assert parameter.grad.item() == (1.0 if unscaled else 8.0)
    assert parameter.item() == 1.0
    delattr(optimizer, name)
    scaler.step(optimizer)
    assert parameter.grad.item() == 1.0
    assert parameter.item() < 1.0


def test_a_kernel_that_would_walk_over_gaps_does_not_divide(make: Callable[..., Any]) -> None:
    """The kernels take memory as it comes: columns of one matrix are divided before, and what lies between is not."""
    buffer = torch.full((50, 3), 8.0)
    parameters = [torch.nn.Parameter(torch.zeros(50)) for _ in range(2)]
    for column, parameter in enumerate(parameters):
        parameter.grad = buffer[:, column]
    GradScaler(4.0).step(make(parameters))
    assert buffer[:, :2].eq(2.0).all()
    assert buffer[:, 2].eq(8.0).all()


def divisions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors are divided outside a kernel, call by call."""
    calls: list[int] = []
    divide = _fused.Divisor.divide_

    def divide_(self: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        calls.append(len(tensors))
        return divide(self, tensors, *args, **kwargs)

    monkeypatch.setattr(_fused.Divisor, "divide_", divide_)
    return calls


@pytest.mark.usefixtures("kernels_are_known")
def test_the_kernel_divides_where_it_is_worth_it(
    kind: Any, make: Any, in_kernel: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Otherwise the tests of this file would all look at one path; on another device PyTorch may have no kernel."""
    if device.type not in ("cpu", "cuda"):
        pytest.skip("whether there is a fused kernel is that device's to say")
    calls = divisions(monkeypatch)
    if kind is torch.optim.Adagrad and not hasattr(make([weight([1.0])]), "_step_supports_amp_scaling"):
        pytest.skip("this PyTorch's kernel of Adagrad takes no factor, and there is none on CUDA")
    GradScaler(4.0).step(make([weight([12.0, 20.0], device=device)]))
    assert calls == ([] if in_kernel else [1])


@pytest.mark.parametrize("scale", [65536.0, 3.0, 0.1, 1000.1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_step_is_that_of_true_gradients_and_they_are_left_behind(
    make: Any, dtype: str, maximize: bool, scale: float
) -> None:
    """Three steps equal, to the bit, those of the same optimizer without a scaler on gradients NumPy divided."""
    values = bits(dtype, 261)
    values = torch.where(values.abs().clamp(1e-20, 1e20) == values.abs(), values, torch.ones_like(values))
    ours, theirs = (weight(values, getattr(torch, dtype)) for _ in range(2))
    settings = {"maximize": maximize, "weight_decay": 0.01, "lr": 0.001}
    scaled, plain, scaler = make([ours], **settings), make([theirs], **settings), GradScaler(scale)
    for _ in range(3):
        quotient = reference.quotient(numbers(values), dtype, scaler.get_scale())
        ours.grad = values.clone()
        theirs.grad = torch.from_numpy(quotient).to(values.dtype)
        scaler.step(scaled)
        plain.step()
        scaler.update()
        assert torch.equal(ours.grad, theirs.grad)
        np.testing.assert_array_equal(numbers(ours.grad), reference.stored(quotient, dtype))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scale", [2.0**-126, 0.1, 1.0, 65536.0, 1000.1, 2.0**127])
def test_no_overflow_is_missed(make: Any, scale: float, value: float, dtype: torch.dtype) -> None:
    """In either dtype and at any scale, one element that is not finite skips the step."""
    held, scaler = weight([1e-30, value, 0.0], dtype), GradScaler(scale)
    optimizer = make([held])
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert held.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.5, 0.1, 2.0**-100])
def test_a_quotient_that_overflows_is_not_missed(make: Any, scale: float, dtype: torch.dtype) -> None:
    """What is beyond the dtype once it is divided is skipped, also where its square is not; what just fits is not."""
    scaler = GradScaler(scale)
    largest = torch.finfo(dtype).max
    fits = largest * scaler.get_scale()
    for value, skipped in ((largest, True), (fits * 1.1, True), (fits * 0.9, False)):
        optimizer = make([weight([1.0, value], dtype)])
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) is skipped


@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_a_skip_calls_nothing_and_leaves_true_gradients(make: Any, scale: float) -> None:
    """No hook, no state, no counted step; the finite gradient is divided, the inf stays."""
    good, bad = weight([12.0, 24.0]), weight([12.0, math.inf])
    optimizer, scaler = make([good, bad]), GradScaler(scale)
    before = repr(optimizer.state_dict())
    calls = counted(optimizer)
    assert scaler.step(optimizer) is None
    assert calls == []
    assert repr(optimizer.state_dict()) == before
    assert good.grad.tolist() == [12.0 / scale, 24.0 / scale]
    assert bad.grad.tolist() == [12.0 / scale, math.inf]
    assert (good.tolist(), bad.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert scaler.step_was_skipped(optimizer)


def test_a_first_step_that_overflows_leaves_no_momentum() -> None:
    """The momentum is first set by the first step that lands: 1 − 0.5·3, then 1 − 0.5·(3 + 0.9·3 + 3)."""
    held, scaler = weight([math.inf]), GradScaler(4.0)
    optimizer = torch.optim.SGD([held], lr=0.5, momentum=0.9, fused=True)
    values = []
    for gradient in (math.inf, 3.0, 3.0):
        held.grad = torch.full((1,), gradient * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        values.append(held.item())
    assert values == pytest.approx([1.0, -0.5, -3.35])


def test_a_scheduler_counts_the_steps_that_land(make: Any) -> None:
    """PyTorch's warning about the order of scheduler and optimizer does not come; the rate halves once."""
    held, scaler = weight([12.0]), GradScaler(4.0)
    optimizer = make([held])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    assert held.grad.item() == 3.0
    assert scheduler.get_last_lr() == [0.25]


def test_several_groups_and_dtypes_in_one_optimizer(make: Any) -> None:
    """Each gradient is divided once, in its own dtype; the one without a gradient stays out of it."""
    held = [weight([12.0] * 3), weight([20.0] * 5, torch.float64), weight([28.0], torch.bfloat16)]
    without = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": held[:1]}, {"params": [*held[1:], without], "lr": 0.1}]
    GradScaler(4.0).step(make(groups))
    assert [p.grad[0].item() for p in held] == [3.0, 5.0, 7.0]
    assert without.tolist() == [1.0, 1.0]
    assert all((p < 1.0).all() for p in held)


def test_a_refusal_leaves_everything(make: Any) -> None:
    """One float16 weight between others: ValueError that names it; bit for bit as before, also state and stage."""
    held = [weight([12.0]), weight([12.0], torch.float16), weight([12.0])]
    optimizer, scaler = make(held), GradScaler(4.0)
    with pytest.raises(ValueError, match="group 0, parameter 1"):
        scaler.step(optimizer)
    assert [p.grad.item() for p in held] == [12.0] * 3
    assert [p.item() for p in held] == [1.0] * 3
    held[1].grad = None
    scaler.step(optimizer)
    assert [p.grad and p.grad.item() for p in held] == [3.0, None, 3.0]


def test_after_unscale_the_kernel_divides_nothing(make: Any) -> None:
    """Clipped gradients are used as they are."""
    held, scaler = weight([12.0]), GradScaler(4.0)
    optimizer = make([held])
    scaler.unscale_(optimizer)
    held.grad.mul_(0.5)
    scaler.step(optimizer)
    assert held.grad.item() == 1.5


def test_a_shared_gradient_is_divided_once(make: Any) -> None:
    """Two fused optimizers, and two parameters that hold one gradient."""
    held, scaler = weight([12.0]), GradScaler(4.0)
    twin = torch.nn.Parameter(torch.ones(1))
    twin.grad = held.grad
    for optimizer in (make([held]), make([twin]), make([held, twin])):
        scaler.step(optimizer)
    assert held.grad.item() == 3.0


def test_no_mark_is_left_on_the_optimizer(make: Any) -> None:
    """After a step that lands and after a skip the optimizer has the attributes that it had."""
    held, scaler = weight([12.0]), GradScaler(4.0)
    optimizer = make([held])
    before = set(vars(optimizer))
    for gradient in (12.0, math.inf):
        held.grad.fill_(gradient)
        scaler.step(optimizer)
        scaler.update()
        assert set(vars(optimizer)) == before
