"""Who looks at the gradients of a fused optimizer, before its step or after it, sees their true values.

Hooks, patched steps and classes of a user's own; each with the division in the optimizer's kernel wherever nobody
would see a difference.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lucid.amp import GradScaler, _fused

CLASSES = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.fixture(autouse=True)
def in_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide in the kernel however small the gradients are, and at every scale."""
    monkeypatch.setattr(_fused, "saves", lambda *_: True)


@pytest.fixture(params=CLASSES, ids=lambda made: made.__name__)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A fused optimizer of each class that has one."""
    return lambda parameters: request.param(parameters, lr=0.5, fused=True)


def weight(gradient: list[float]) -> torch.nn.Parameter:
    """A parameter with this gradient."""
    made = torch.nn.Parameter(torch.ones(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


def test_hooks_before_a_step_see_true_gradients(make: Any) -> None:
    """The optimizer's own, and those that are registered for all optimizers."""
    for everywhere in (False, True):
        held, seen = weight([12.0]), []
        optimizer = make([held])

        def look(*_: Any, held: Any = held, seen: list[float] = seen) -> None:
            seen.append(held.grad.item())

        handle = register_optimizer_step_pre_hook(look) if everywhere else optimizer.register_step_pre_hook(look)
        GradScaler(4.0).step(optimizer)
        handle.remove()
        assert seen == [3.0]


def test_hooks_after_a_step_see_true_gradients_and_hear_of_this_optimizer_alone(make: Any) -> None:
    """Nobody hears of an optimizer that the user did not make."""
    held, heard = weight([12.0]), []
    optimizer = make([held])
    _fused._proved.cache_clear()
    optimizer.register_step_post_hook(lambda *_: heard.append(held.grad.item()))
    handle = register_optimizer_step_post_hook(lambda stepped, *_: heard.append(stepped is optimizer))
    GradScaler(4.0).step(optimizer)
    handle.remove()
    assert sorted(heard) == [True, 3.0]


def method(optimizer: Any, seen: Callable[[], None]) -> None:
    """Patch the step of this one optimizer by a method."""
    original = optimizer.step

    def step(self: Any, *args: Any) -> Any:
        seen()
        return original(*args)

    optimizer.step = types.MethodType(step, optimizer)


def function(optimizer: Any, seen: Callable[[], None]) -> None:
    """Patch the step of this one optimizer by a function."""
    original = optimizer.step

    def step(*args: Any) -> Any:
        seen()
        return original(*args)

    optimizer.step = step


# PyTorch's schedulers wrap methods only, so that a function can be put there after them.
@pytest.mark.parametrize(
    ("patch", "scheduled"),
    [(method, "not"), (method, "before"), (method, "after"), (function, "not"), (function, "before")],
)
def test_a_patched_step_sees_true_gradients(make: Any, patch: Any, scheduled: str) -> None:
    """Whoever replaced the step of an optimizer looks at its gradients; a scheduler's wrapper hides him not."""
    held, seen = weight([12.0]), []
    optimizer = make([held])
    if scheduled == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    patch(optimizer, lambda: seen.append(held.grad.item()))
    if scheduled == "after":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    GradScaler(4.0).step(optimizer)
    assert seen == [3.0]
    assert held.grad.item() == 3.0


@pytest.mark.parametrize("early", [False, True])
def test_a_class_whose_step_was_patched_sees_true_gradients(
    make: Any, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before an optimizer was made or after."""
    held, seen = weight([12.0]), []
    kind = type(make([held]))
    original = kind.step

    def step(self: Any, *args: Any) -> Any:
        seen.append(held.grad.item())
        return original(self, *args)

    optimizer = None if early else make([held])
    monkeypatch.setattr(kind, "step", step)
    GradScaler(4.0).step(optimizer or make([held]))
    assert seen == [3.0]


def test_a_class_of_a_users_own_sees_true_gradients() -> None:
    """A step that looks before it calls the original; a constructor of its own is never called for a trial."""
    seen: list[float] = []

    class Looking(torch.optim.AdamW):
        def __init__(self, held: torch.nn.Parameter) -> None:
            super().__init__([held], lr=0.5, fused=True)

        def step(self, closure: Any = None) -> Any:
            seen.append(self.param_groups[0]["params"][0].grad.item())
            return super().step(closure)

    class Inheriting(Looking):
        step = torch.optim.AdamW.step

    for kind in (Looking, Inheriting):
        held = weight([12.0])
        GradScaler(4.0).step(kind(held))
        assert held.grad.item() == 3.0
        assert held.item() != 1.0
    assert seen == [3.0]
