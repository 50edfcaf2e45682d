"""Random programs, run by the scaler and by the reference, which must agree after every call."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import example, given, settings
from strategies import ELEMENTS, Call, World, programs, worlds
from values import numbers

from lucid.amp import GradScaler, _fused

BAD = {"scale": -4.0, "growth_factor": 0.5, "backoff_factor": 2.0, "growth_interval": 0}


class Duck:
    """Gradient descent without ``torch.optim``: only what a scaler asks of an optimizer."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Descend by the gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= parameter.grad

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Take one more group."""
        self.param_groups.append(group)


class Unhashable(Duck):
    """Equal to everything, so that only ``is`` tells it from others."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Say yes to anything."""
        return True


def optimizer(kind: str, parameters: list[torch.nn.Parameter]) -> Any:
    """Gradient descent with a learning rate of 1, of that kind where PyTorch has it for these parameters."""
    if kind == "unhashable":
        return Unhashable(parameters)
    if kind == "duck" or not parameters:
        return Duck(parameters)
    flags = {} if kind == "plain" or any(p.is_complex() for p in parameters) else {kind: True}
    return torch.optim.SGD(parameters, lr=1.0, **flags)


class Machine:
    """A scaler and the reference, both doing what a program says."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dtypes = [getattr(torch, dtype) for dtype in world.dtypes]
        self.parameters = [torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype)) for dtype in self.dtypes]
        self.optimizers = [self.made(kind, held) for kind, held in world.optimizers]
        self.models = [reference.Optimizer(list(held)) for _, held in world.optimizers]
        self.scaler, self.model = GradScaler(*world.settings), reference.Reference(*world.settings)
        self.saved = [(self.scaler.state_dict(), self.standing())]

    def made(self, kind: str, held: tuple[int, ...]) -> Any:
        """An optimizer over the parameters of these numbers."""
        return optimizer(kind, [self.parameters[index] for index in held])

    def standing(self) -> tuple[float, ...]:
        """What a checkpoint holds, as the reference has it."""
        model = self.model
        return (model.scale, model.growth, model.backoff, model.interval, model.count)

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any]:
        """Do one thing on both sides; they return, or raise the same kind of error."""
        try:
            expected, error = model(), None
        except (RuntimeError, ValueError, TypeError) as raised:
            expected, error = None, type(raised)
        try:
            result, found = real(), None
        except (RuntimeError, ValueError, TypeError) as raised:
            result, found = None, type(raised)
        assert found is error
        return result, expected

    def refused(self, real: Callable[[], Any]) -> None:
        """Do what must be refused."""
        try:
            real()
        except (TypeError, ValueError):
            return
        raise AssertionError("was not refused")

    # Gradients.

    def backward(self, indices: list[int], values: list[float]) -> None:
        """Run backward through a scaled loss whose gradients are these."""
        weights = torch.tensor(values)
        real = [p.real if p.is_complex() else p.float() for p in (self.parameters[i] for i in indices)]
        loss = torch.stack([(p * weights).sum() for p in real]).sum()
        self.scaler.scale(loss).backward()
        with np.errstate(all="ignore"):
            scaled = np.float32(self.model.scale) * np.array(values, dtype=np.float32)
        for index in indices:
            self._add(index, scaled)

    def _add(self, index: int, values: np.ndarray) -> None:
        """Add to the reference's gradient, as backward does."""
        dtype, grad = self.world.dtypes[index], self.model.grads.get(index)
        with np.errstate(all="ignore"):
            added = reference.stored(values, dtype)
            if grad is None:
                self.model.grads[index] = reference.Grad(added, dtype)
            else:
                grad.values = reference.stored(grad.values + added, dtype)

    def assign(self, index: int, values: list[float]) -> None:
        """Give a parameter a new gradient."""
        self.parameters[index].grad = torch.tensor(values).to(self.dtypes[index])
        self.model.grads.pop(index, None)
        self._add(index, np.array(values, dtype=np.float32))

    def accumulate(self, index: int, values: list[float]) -> None:
        """Add to a gradient in place."""
        if self.parameters[index].grad is not None:
            self.parameters[index].grad += torch.tensor(values).to(self.dtypes[index])
            self._add(index, np.array(values, dtype=np.float32))

    def share(self, index: int, other: int) -> None:
        """Let two parameters hold the very same gradient."""
        if index in self.model.grads and self.dtypes[index] is self.dtypes[other]:
            self.parameters[other].grad = self.parameters[index].grad
            self.model.grads[other] = self.model.grads[index]

    def clear(self, index: int) -> None:
        """Set a gradient to None."""
        self.parameters[index].grad = None
        self.model.grads.pop(index, None)

    def fill_with_zero(self, index: int) -> None:
        """Fill a gradient with zeros in place: it stays the gradient that it was."""
        if self.parameters[index].grad is not None:
            self.parameters[index].grad.zero_()
            self.model.grads[index].values = np.zeros_like(self.model.grads[index].values)

    # The iteration.

    def unscale(self, number: int) -> None:
        """Unscale an optimizer's gradients."""
        opt, model = self.optimizers[number], self.models[number]
        self.both(lambda: self.scaler.unscale_(opt), lambda: self.model.unscale_(model))

    def clip(self, number: int, max_norm: float) -> None:
        """Unscale and clip; what the clipped gradients are beyond rounding is taken from the scaler."""
        opt, model = self.optimizers[number], self.models[number]
        norm, _ = self.both(lambda: self.scaler.clip_grad_norm_(opt, max_norm), lambda: self.model.unscale_(model))
        if norm is None:
            return
        # As PyTorch counts it: a gradient of two parameters twice.
        counted = [grad for parameter in model.parameters if (grad := self.model.grads.get(parameter)) is not None]
        held = {id(grad): grad for grad in counted}
        true = math.sqrt(sum(float((grad.values.astype(np.float64) ** 2).sum()) for grad in counted))
        if model.overflow:
            assert not math.isfinite(norm)
            return
        tolerance = 1e-5 if all(grad.dtype != "bfloat16" for grad in held.values()) else 1e-2
        beyond = true > torch.finfo(norm.dtype).max
        # Squares below 1e-38 lose digits in float32, in PyTorch's norms too.
        np.testing.assert_allclose(norm.item(), math.inf if beyond else true, rtol=tolerance, atol=1e-18)
        for index in model.parameters:
            if index in self.model.grads:
                self._adopt(index, held.pop(id(self.model.grads[index]), None), max_norm / (true + 1e-6), tolerance)

    def _adopt(self, index: int, grad: reference.Grad | None, coefficient: float, tolerance: float) -> None:
        if grad is not None:
            found = numbers(self.parameters[index].grad)
            expected = grad.values * min(1.0, coefficient)
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-35)
            grad.values = found.copy()

    def step(self, number: int, how: str) -> None:
        """Step an optimizer; the parameters move by its gradients, or not at all."""
        opt, model = self.optimizers[number], self.models[number]
        arguments = {"None": (None,), "closure": (lambda: None,)}.get(how, ())
        keywords = {"closure": lambda: None} if how == "keyword closure" else {}
        before = [numbers(parameter).copy() for parameter in self.parameters]
        _, lands = self.both(
            lambda: self.scaler.step(opt, *arguments, **keywords), lambda: self.model.step(model, "closure" in how)
        )
        for index, parameter in enumerate(self.parameters):
            expected = before[index]
            if lands and index in model.parameters and index in self.model.grads:
                with np.errstate(all="ignore"):
                    expected = reference.stored(expected - self.model.grads[index].values, self.world.dtypes[index])
            if not parameter.is_complex():  # whose inf would be PyTorch's complex arithmetic's
                np.testing.assert_array_equal(numbers(parameter), expected)

    def update(self) -> None:
        """End the iteration."""
        self.both(self.scaler.update, self.model.update)

    def update_to(self, scale: float) -> None:
        """End the iteration with another scale."""
        self.both(lambda: self.scaler.update(scale), lambda: self.model.update(scale))

    def update_to_bad(self, scale: Any) -> None:
        """Ask for a scale that is none."""
        self.refused(lambda: self.scaler.update(scale))

    # Between iterations, or in the middle of one.

    def save(self) -> None:
        """Save a checkpoint, through JSON."""
        self.saved.append((json.loads(json.dumps(self.scaler.state_dict())), self.standing()))

    def load(self) -> None:
        """Load the last checkpoint."""
        state, standing = self.saved[-1]
        self.scaler.load_state_dict(state)
        model = self.model
        model.scale, model.growth, model.backoff, model.interval, model.count = standing

    def load_bad(self, key: str) -> None:
        """Load a checkpoint in which one value is wrong, or missing."""
        state = {**self.saved[-1][0], **({key: BAD[key]} if key in BAD else {})}
        if key == "missing":
            del state["_growth_tracker"]
        self.refused(lambda: self.scaler.load_state_dict(state))

    def copy(self, how: str) -> None:
        """Go on with a copy; in the middle of an iteration there is none."""
        way = copy.deepcopy if how == "deepcopy" else lambda scaler: pickle.loads(pickle.dumps(scaler))
        copied, expected = self.both(lambda: way(self.scaler), self._copied_model)
        if copied is not None:
            self.scaler, self.model = copied, expected

    def _copied_model(self) -> reference.Reference:
        if self.model.turns:
            raise RuntimeError
        copied = reference.Reference(*self.standing()[:4])
        copied.count, copied.grads = self.model.count, self.model.grads
        for model in self.models:
            model.last_skipped = None
        return copied

    def set(self, setting: tuple[str, float]) -> None:
        """Change a setting."""
        name, value = setting
        getattr(self.scaler, f"set_{name}")(value)
        setattr(self.model, name.split("_")[name.startswith("growth_i")], value)

    def set_bad(self, setting: tuple[str, float]) -> None:
        """Change a setting to what it cannot be."""
        name, value = setting
        self.refused(lambda: getattr(self.scaler, f"set_{name}")(value))

    def replace_optimizer(self, number: int) -> None:
        """Drop an optimizer, and make another one for its parameters, perhaps at the same address."""
        kind, held = self.world.optimizers[number][0], tuple(self.models[number].parameters)
        self.optimizers[number] = None
        self.optimizers[number] = self.made(kind, held)
        self.models[number] = reference.Optimizer(list(held))

    def add_parameter(self, number: int, index: int) -> None:
        """Give an optimizer one more parameter."""
        opt, model = self.optimizers[number], self.models[number]
        fused = isinstance(opt, torch.optim.Optimizer) and opt.defaults.get("fused")
        if index not in model.parameters and not (fused and self.parameters[index].is_complex()):
            opt.add_param_group({"params": [self.parameters[index]]})
            model.parameters.append(index)

    # What must agree.

    def check(self) -> None:
        """Compare all that can be seen."""
        assert tuple(self.scaler.state_dict().values()) == self.standing()
        assert self.scaler.get_scale() == self.model.scale
        for index, parameter in enumerate(self.parameters):
            grad = self.model.grads.get(index)
            assert (parameter.grad is None) == (grad is None)
            if grad is not None:
                np.testing.assert_array_equal(numbers(parameter.grad), grad.values)
        for opt, model in zip(self.optimizers, self.models, strict=True):
            assert self.answer(opt) == model.last_skipped
        self.check_last_update()

    def answer(self, opt: Any) -> bool | None:
        """Whether the last step was skipped; None where there was none."""
        try:
            return self.scaler.step_was_skipped(opt)
        except RuntimeError:
            return None

    def check_last_update(self) -> None:
        """Compare the record of the last update; the order of a refused optimizer is not looked at here."""
        update, expected = self.scaler.last_update, self.model.last_update
        assert (update is None) == (expected is None)
        if update is not None:
            found = (update.index, update.scale, update.new_scale, update.overflow, sorted(update.skipped))
            assert found == (*expected[:4], sorted(expected[4]))


# Two gradients that float32 holds, and whose norm it does not.
HUGE = [("assign", (index, [1.0, 1.0, 3e38])) for index in (0, 1)]
PAIR = World(("float32",) * 4, (("plain", (0, 1)), ("fused", ()), ("duck", ())), (1.0, 2.0, 0.5, 1), in_kernel=False)
# A float32 gradient beside a float64 one that is beyond float32: at scale 0.1 their norm is √(9e76 + 9e78).
MIXED = [("assign", (0, [3e37, 0.0, 0.0])), ("assign", (1, [3e38, 0.0, 0.0]))]
WIDE = replace(PAIR, dtypes=("float32", "float64", "float32", "float32"), settings=(0.1, 2.0, 0.5, 1))


# The warnings have tests of their own.
@pytest.mark.filterwarnings("ignore:the scale fell below 1", "ignore:25 updates in a row")
@settings(max_examples=20 * settings.default.max_examples)
@given(world=worlds(), program=programs())
@example(world=WIDE, program=[*MIXED, ("clip", (0, 1e38))])
@example(world=PAIR, program=[*HUGE, ("clip", (0, 1e38)), ("step", (0, "alone"))])
def test_any_sequence_of_calls_does_what_the_reference_does(world: World, program: list[Call]) -> None:
    """Gradients, parameters, scale, count, stages, skipped steps and exceptions agree after each call."""
    machine = Machine(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fused, "saves", lambda *_: world.in_kernel)
        for name, arguments in program:
            getattr(machine, name)(*arguments)
            machine.check()
