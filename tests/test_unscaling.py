"""What is left after a division that stops in the middle: nothing is divided twice, and nothing is stepped by."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from interrupts import interrupted
from torch import Tensor
from torch.nn import Parameter

from lucid.amp import (
    GradScaler,
    _clip,
    _division,
    _fused,
    _gradients,
    _memory,
    _norms,
    _reading,
    _seen,
    _torch,
    _unscaling,
)


def failing(call: Callable[..., None], error: type[BaseException]) -> Callable[..., None]:
    """The function, which raises at its second call."""
    calls = iter([True, False])

    def second_raises(*args: Any) -> None:
        if not next(calls, True):
            raise error("no memory")
        call(*args)

    return second_raises


@pytest.fixture
def optimizer() -> torch.optim.SGD:
    """A float32 and a float64 parameter, which are divided one after the other; both gradients are 9."""
    parameters = [Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 9.0)
    return torch.optim.SGD(parameters, lr=1.0)


def gradients(optimizer: torch.optim.Optimizer) -> list[float]:
    """The values of all gradients."""
    return [parameter.grad.item() for parameter in optimizer.param_groups[0]["params"]]


def calls_of(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], object]]:
    """The three calls that divide, by name; the clipping has nothing to clip."""
    return {
        "unscale_": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "clip_grad_norm_": lambda: scaler.clip_grad_norm_(optimizer, 1e9),
    }


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("begin", ["unscale_", "step", "clip_grad_norm_"])
def test_no_retry_divides_again(
    begin: str, error: type[BaseException], optimizer: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error between two divisions of 9 by 3 one is 3 and one 9: a retry changes neither, and step skips."""
    scaler = GradScaler(3.0)
    calls = calls_of(scaler, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "divide_", failing(_torch.divide_, error))
        with pytest.raises(error, match="no memory"):
            calls[begin]()
    stopped = gradients(optimizer)
    assert sorted(stopped) == [3.0, 9.0]
    for retry in ("unscale_", "clip_grad_norm_"):
        with pytest.raises(RuntimeError, match="already ran"):
            calls[retry]()
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert gradients(optimizer) == stopped
    assert [parameter.item() for parameter in optimizer.param_groups[0]["params"]] == [0.0, 0.0]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("begin", ["unscale_", "step", "clip_grad_norm_"])
def test_autograd_is_as_it_was(
    begin: str, enabled: bool, fails: bool, optimizer: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that require a gradient themselves are divided outside autograd, which is put back, come what may."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.requires_grad_(True)
    scaler = GradScaler(3.0)
    calls = calls_of(scaler, optimizer)
    if fails:
        monkeypatch.setattr(_torch, "divide_", failing(_torch.divide_, MemoryError))
    with torch.set_grad_enabled(enabled):
        with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
            calls[begin]()
        assert torch.is_grad_enabled() is enabled
    assert gradients(optimizer) == ([3.0, 9.0] if fails else [3.0, 3.0])
    assert all(parameter.grad.grad_fn is None for parameter in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.SGD, fused=True)])
@pytest.mark.parametrize("scale", [3.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("begin", ["unscale_", "step", "clip_grad_norm_"])
@pytest.mark.usefixtures("operator")
def test_no_division_is_noted_by_autograd(begin: str, dtype: torch.dtype, scale: float, kind: Any) -> None:
    """A gradient that requires one, first of one optimizer and then of another, who only judges it: 12 / scale."""
    parameters = [Parameter(torch.zeros(2, dtype=dtype)) for _ in range(2)]
    gradient = torch.full((2,), 12.0, dtype=dtype, requires_grad=True)
    for parameter in parameters:
        parameter.grad = gradient
    scaler = GradScaler(scale)
    for parameter in parameters:
        calls_of(scaler, kind([parameter], lr=1.0))[begin]()
        assert parameter.grad.tolist() == [12.0 / scale] * 2
        assert parameter.grad.grad_fn is None
        assert parameter.grad.is_leaf


def test_a_sparse_gradient_that_requires_one_is_divided_outside_autograd() -> None:
    """Its entries are added first, which autograd would note: 4 and 8 at one index are 12, over 3."""
    parameter = Parameter(torch.zeros(2))
    parameter.grad = torch.sparse_coo_tensor([[1, 1]], [4.0, 8.0], (2,), requires_grad=True, check_invariants=True)
    GradScaler(3.0).unscale_(torch.optim.SGD([parameter], lr=1.0))
    assert parameter.grad.grad_fn is None
    assert parameter.grad.to_dense().tolist() == [0.0, 4.0]


@pytest.mark.parametrize("begin", ["unscale_", "step", "clip_grad_norm_"])
def test_an_interrupt_at_any_line_divides_nothing_twice(begin: str) -> None:
    """Ctrl-C may come between any two lines: 8 over 4 is then 8 or 2, and a retry steps by 2 or by nothing."""
    for line in itertools.count():
        parameter = Parameter(torch.zeros(1))
        parameter.grad = torch.full_like(parameter, 8.0)
        scaler, optimizer = GradScaler(4.0), torch.optim.SGD([parameter], lr=1.0)
        calls = calls_of(scaler, optimizer)
        if not interrupted(calls[begin], line, UNTIL_THE_STEP):
            break
        assert parameter.grad.item() in (8.0, 2.0)
        scaler.step(optimizer)
        assert parameter.item() in (0.0, -2.0)
        assert parameter.item() == 0.0 or parameter.grad.item() == 2.0
    assert line > 20


UNTIL_THE_STEP = tuple(
    str(Path(module.__file__)) for module in (_unscaling, _seen, _division, _gradients, _clip, _norms, _memory)
)


def test_the_next_iteration_is_as_any(optimizer: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch) -> None:
    """update() gives the iteration up as one that overflowed; new gradients are divided and stepped by."""
    scaler = GradScaler(3.0)
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "divide_", failing(_torch.divide_, MemoryError))
        with pytest.raises(MemoryError):
            scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.5
    parameters: list[Tensor] = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 6.0)
    scaler.step(optimizer)
    assert [parameter.item() for parameter in parameters] == [-4.0, -4.0]


def full(*_: Any) -> NoReturn:
    """Raise as if there were no memory."""
    raise MemoryError("no memory")


@pytest.fixture(params=[torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    """A fused optimizer that divides gradients of 12 and 0, in a group each, in its kernel."""
    monkeypatch.setattr(_fused, "saves", lambda *_: True)
    parameters = [Parameter(torch.ones(1)) for _ in range(2)]
    for parameter, value in zip(parameters, (12.0, 0.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    made: torch.optim.Optimizer = request.param([{"params": [one]} for one in parameters], lr=0.25, fused=True)
    return made


@pytest.mark.usefixtures("kernels_are_known")
def test_an_error_before_the_kernel_divides_is_made_good(
    fused: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of the zeros is read before the step: if that fails, 12 over 4 is 3 all the same; a retry lands."""
    parameter, scaler = fused.param_groups[0]["params"][0], GradScaler(4.0)
    with monkeypatch.context() as there, pytest.raises(MemoryError, match="no memory"):
        there.setattr(_reading, "_power", full)
        scaler.step(fused)
    assert parameter.grad.item() == 3.0
    scaler.step(fused)
    assert (parameter.grad.item(), scaler.step_was_skipped(fused)) == (3.0, False)
    assert parameter.item() < 1.0
    assert not hasattr(fused, "grad_scale")


@pytest.mark.usefixtures("kernels_are_known")
def test_an_error_in_the_kernel_and_another_after_it_are_given_up(
    fused: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can tell what the kernel has divided, no retry steps by it: the iteration overflowed."""
    parameter, scaler = fused.param_groups[0]["params"][0], GradScaler(4.0)

    def step(*_: Any) -> None:
        there.setattr(_norms, "power", full)
        full()

    with monkeypatch.context() as there, pytest.raises(MemoryError, match="no memory"):
        there.setattr(type(fused), "_init_group", step)
        scaler.step(fused)
    scaler.step(fused)
    assert scaler.step_was_skipped(fused)
    assert parameter.item() == 1.0
    scaler.update()
    assert scaler.last_update is not None
    assert scaler.last_update.overflow


@pytest.mark.usefixtures("kernels_are_known")
@pytest.mark.parametrize("factor", [1000.0, 0.25, 3.0])
@pytest.mark.parametrize("place", [0, 1])
def test_what_a_hook_has_changed_since_is_not_divided_again(
    fused: torch.optim.Optimizer, place: int, factor: float
) -> None:
    """A hook after the step multiplies 3, or sets what was 0, and raises: its own error, and its own values."""
    gradients = [group["params"][0].grad for group in fused.param_groups]
    expected = [3.0, 0.0]
    expected[place] = (expected[place] or 1.0) * factor

    def hook(*_: Any) -> NoReturn:
        gradients[place].fill_(expected[place])
        full()

    fused.register_step_post_hook(hook)
    with pytest.raises(MemoryError, match="no memory"):
        GradScaler(4.0).step(fused)
    assert [gradient.item() for gradient in gradients] == expected
