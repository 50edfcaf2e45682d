"""Which gradients are divided, which are refused by name, and that none is divided twice."""

import math
from typing import Any

import pytest
import torch
from duck import Duck, with_grad

from lucid.amp import GradScaler


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A parameter whose gradient is one value throughout."""
    return with_grad(torch.full(shape or (3,), value, dtype=dtype))


def grads(optimizer: Any) -> list[list[float]]:
    """The gradients of an optimizer, flat."""
    return [p.grad.flatten().tolist() for group in optimizer.param_groups for p in group["params"]]


REFUSED = [
    (torch.float16, ValueError, r"float32.*\.float\(\).*autocast"),
    (torch.complex32, NotImplementedError, "view_as_real"),
    (torch.complex64, NotImplementedError, "view_as_real"),
    (torch.complex128, NotImplementedError, "view_as_real"),
    (torch.float8_e4m3fn, TypeError, "Convert the parameter"),
    (torch.float8_e5m2, TypeError, "Convert the parameter"),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize(("dtype", "error", "next_move"), REFUSED)
def test_a_dtype_that_is_not_divided_is_refused_whole(
    dtype: torch.dtype, error: type[Exception], next_move: str, call: str
) -> None:
    """The message names parameter, shape, dtype and the next move; no gradient and no stage has changed."""
    scaler = GradScaler(4.0)
    refused = with_grad(torch.ones(2, 3).to(dtype))
    good = [full(16.0), full(math.inf)]
    optimizer = Duck(good[0], refused, good[1])
    for _ in range(2):
        with pytest.raises(error, match=next_move) as raised:
            getattr(scaler, call)(optimizer)
        for part in ("group 0, parameter 1", "(2, 3)", str(dtype), "Duck"):
            assert part in str(raised.value)
        assert good[0].grad.tolist() == [16.0] * 3
        assert good[1].grad.tolist() == [math.inf] * 3
        assert bool((refused.grad.to(torch.complex64) == 1).all())
    assert optimizer.steps == 0
    refused.grad = good[1].grad = None
    scaler.unscale_(optimizer)
    assert good[0].grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_a_gradient_that_is_no_float_is_refused(dtype: torch.dtype) -> None:
    """PyTorch gives none, a parameter of a user's own may: TypeError with its dtype."""

    class Holder:
        grad = torch.ones(2).to(dtype)

    with pytest.raises(TypeError, match=str(dtype)):
        GradScaler().unscale_(Duck(Holder()))


def test_the_parameter_is_named_as_the_optimizer_names_it() -> None:
    """An optimizer built from named_parameters() gives the name, any other one group and index."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"'1\.weight' \(shape \(2, 2\), torch\.float16"):
        GradScaler().unscale_(torch.optim.SGD(model.named_parameters(), lr=1.0))
    groups = [{"params": model[0].parameters()}, {"params": [model[1].bias]}]
    with pytest.raises(ValueError, match="'group 1, parameter 0'"):
        GradScaler().unscale_(torch.optim.SGD(groups, lr=1.0))


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_gradient_on_the_meta_device_is_refused(call: str) -> None:
    """It holds no values: TypeError names it and the way out, nothing is divided, and the iteration can be given up."""
    optimizer = Duck(full(8.0), with_grad(torch.zeros(3, device="meta")))
    scaler = GradScaler(4.0)
    with pytest.raises(TypeError, match=r"group 0, parameter 1.*meta device.*to_empty"):
        getattr(scaler, call)(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [8.0] * 3
    assert not scaler._stages.in_progress()
    scaler.update()


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_an_inference_tensor_is_refused(call: str) -> None:
    """It cannot be changed: RuntimeError with its name, before anything is divided."""
    with torch.inference_mode():
        gradient = torch.full((3,), 8.0)
    optimizer = Duck(full(8.0), with_grad(gradient, torch.zeros(3)))
    with pytest.raises(RuntimeError, match=r"group 0, parameter 1.*inference.*clone"):
        getattr(GradScaler(4.0), call)(optimizer)
    assert grads(optimizer) == [[8.0] * 3] * 2


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_what_is_no_optimizer_is_refused(call: str) -> None:
    """A model, or its parameters, given in its place is a TypeError that says what is wanted."""
    scaler, model = GradScaler(), torch.nn.Linear(2, 2)
    for wrong in (model, list(model.parameters()), None):
        with pytest.raises(TypeError, match=f"param_groups and step.*{type(wrong).__name__}"):
            getattr(scaler, call)(wrong)
    scaler.state_dict()
    assert not scaler._stages.in_progress()


def test_no_gradient_and_no_parameter_is_no_error() -> None:
    """Nothing overflowed: the optimizer is called as a plain loop would call it."""
    for optimizer in (Duck(torch.nn.Parameter(torch.zeros(2))), Duck()):
        scaler = GradScaler(growth_interval=1)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.steps == 1
        assert scaler.get_scale() == 131072.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_on_the_device(dtype: torch.dtype, device: torch.device) -> None:
    """Wherever the gradients are, they are divided there, and an inf there skips."""
    parameters = [with_grad(torch.full((5,), 12.0, dtype=dtype, device=place)) for place in (device, "cpu")]
    optimizer, scaler = Duck(*parameters), GradScaler(4.0)
    scaler.unscale_(optimizer)
    assert grads(optimizer) == [[3.0] * 5] * 2
    scaler.update()
    parameters[0].grad[4] = -math.inf
    scaler.step(optimizer)
    assert optimizer.steps == 0


def test_a_default_dtype_changes_nothing() -> None:
    """A program that computes in float64 by default may hold float32 gradients."""
    optimizer = Duck(full(12.0))
    torch.set_default_dtype(torch.float64)
    try:
        GradScaler(4.0).step(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert grads(optimizer) == [[3.0] * 3]
    assert optimizer.steps == 1


def test_a_freed_gradient_leaves_no_trace_at_its_address() -> None:
    """A gradient that is gone, and another one in the same memory, are two: each is divided."""
    scaler, memory = GradScaler(4.0), torch.empty(3)
    parameter = torch.nn.Parameter(torch.zeros(3))
    for _ in range(8):
        parameter.grad = memory.fill_(8.0).view(3)
        scaler.unscale_(Duck(parameter))
        assert parameter.grad.tolist() == [2.0] * 3
        parameter.grad = None
