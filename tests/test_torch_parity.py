"""The same training as with PyTorch's scaler, bit for bit, for every optimizer that takes dense float32 parameters.

With scales that are powers of two both divisions are exact, so that every parameter of every step must be equal.
"""

import inspect
import math
from typing import Any

import pytest
import torch

from lucid.amp import GradScaler, _fused

STEPS = 50
# Early ones meet an optimizer without state; two in a row; the last step but one.
OVERFLOWS = {0, 1, 7, 20, 21, 48}
SETTINGS: dict[str, Any] = {"init_scale": 2.0**14, "growth_interval": 6}

NOT_DENSE_STEPS = {
    "LBFGS": "it needs a closure, which both scalers refuse",
    "SparseAdam": "it takes sparse gradients only",
}


def optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    """Every optimizer class that ``torch.optim`` offers and that takes dense gradients."""
    found = {thing for thing in vars(torch.optim).values() if inspect.isclass(thing)}
    classes = {kind for kind in found if issubclass(kind, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    return sorted((kind for kind in classes if kind.__name__ not in NOT_DENSE_STEPS), key=lambda kind: kind.__name__)


FORMS: dict[str, tuple[dict[str, bool], bool]] = {
    "plain": ({"foreach": False}, False),
    "foreach": ({"foreach": True}, False),
    "fused": ({"fused": True}, False),
    "fused, dividing": ({"fused": True}, True),
}
"""The form of an optimizer: its settings, and whether its kernel divides where it can."""


def ways() -> list[Any]:
    """Each class in each of its forms."""
    found = []
    for kind in optimizer_classes():
        takes = inspect.signature(kind).parameters.keys()
        for form, (settings, in_kernel) in FORMS.items():
            if settings.keys() <= takes:
                found.append(pytest.param(kind, settings, in_kernel, id=f"{kind.__name__}, {form}"))
            elif form == "plain":
                found.append(pytest.param(kind, {}, in_kernel, id=f"{kind.__name__}, {form}"))
    return found


EXTRA = {
    "SGD": {"lr": 0.01, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"maximize": True},
}


class Own(torch.optim.Optimizer):
    """A user's optimizer: descent by sign, with a state."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Descend by the sign of a running mean."""
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                parameter.sub_(mean.sign(), alpha=group["lr"])


class Duck:
    """A duck-typed optimizer: what both scalers ask for, and nothing more."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    @torch.no_grad()
    def step(self) -> None:
        """Descend."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def network() -> torch.nn.Module:
    """The same small network at each call; its weights are matrices, which is all that Muon takes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8, bias=False),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 5, bias=False),
        torch.nn.Linear(5, 2, False),
    )


class Training:
    """One network, its optimizer and its scaler, step by step."""

    def __init__(self, kind: Any, settings: dict[str, Any], scaler: Any) -> None:
        self.model = network()
        self.optimizer = kind(self.model.parameters(), **settings)
        self.scaler = scaler

    def step(self, number: int, overflows: set[int]) -> None:
        """Forward under autocast, backward, step, update."""
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", torch.float16):
            outputs = self.model(inputs)
        loss = outputs.float().square().mean() * (math.inf if number in overflows else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def parameters(self) -> list[torch.Tensor]:
        """The parameters now."""
        return [parameter.detach() for parameter in self.model.parameters()]


def check_same_training(kind: Any, settings: dict[str, Any], overflows: set[int] = OVERFLOWS) -> None:
    """50 steps with both scalers; after each the parameters and the scale are equal."""
    ours = Training(kind, settings, GradScaler(**SETTINGS))
    theirs = Training(kind, settings, torch.amp.GradScaler("cpu", **SETTINGS))
    start = [parameter.clone() for parameter in ours.parameters()]
    for number in range(STEPS):
        ours.step(number, overflows)
        theirs.step(number, overflows)
        assert all(map(torch.equal, ours.parameters(), theirs.parameters())), f"step {number}"
        assert ours.scaler.get_scale() == theirs.scaler.get_scale()
        assert ours.scaler.step_was_skipped(ours.optimizer) is (number in overflows)
    assert not any(map(torch.equal, ours.parameters(), start)), "nothing was trained"


@pytest.mark.parametrize(("kind", "form", "in_kernel"), ways())
def test_every_optimizer_trains_as_with_pytorchs_scaler(
    kind: Any, form: dict[str, bool], in_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit over 50 steps with overflows in between, the first two steps among them."""
    monkeypatch.setattr(_fused, "saves", lambda *_: in_kernel)
    check_same_training(kind, {**EXTRA.get(kind.__name__, {}), **form})


@pytest.mark.parametrize(("form", "in_kernel"), FORMS.values(), ids=FORMS)
def test_sgd_with_momentum_trains_as_with_pytorchs_scaler(
    form: dict[str, bool], in_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch's fused form uses uninitialised memory, after an overflow in its first step, it is not compared."""
    monkeypatch.setattr(_fused, "saves", lambda *_: in_kernel)
    check_same_training(
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9, "nesterov": True, **form},
        OVERFLOWS - {0, 1} if "fused" in form else OVERFLOWS,
    )


@pytest.mark.parametrize("kind", [Own, Duck])
def test_an_optimizer_of_a_users_own_trains_as_with_pytorchs_scaler(kind: Any) -> None:
    """A subclass of Optimizer, and an object that only has param_groups and step."""
    check_same_training(kind, {})


def test_no_optimizer_is_left_out() -> None:
    """The classes that are not compared exist, and those that are include the best known."""
    assert all(hasattr(torch.optim, name) for name in NOT_DENSE_STEPS)
    names = {kind.__name__ for kind in optimizer_classes()}
    assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"} <= names
