"""Stand-ins for methods of a scaler, while somebody listens to it.

Knows how PyTorch's scaler tells a skip: the optimizer is not called, or, where it is fused, it is called with
``found_inf`` set. Refuses to know who listens and why, and hands every argument and result on untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

Heard = dict[str, Callable[..., None]]
"""A listener's methods, by the event that each is for."""


class SeenGradient(NamedTuple):
    """A gradient of a step that was skipped.

    Attributes:
        name: the parameter's name where the optimizer was built from ``named_parameters()``, otherwise
            ``"group 0, parameter 3"``.
        parameter: the parameter.
        tensor: the gradient's values, dense and local to this process.
        scale: what the values are still multiplied by, a one-element tensor; None where they were divided.
    """

    name: str
    parameter: torch.Tensor
    tensor: torch.Tensor
    scale: torch.Tensor | None = None


class Taps:
    """The stand-ins on one scaler and all who listen through them. A subclass has a method ``on_<name>`` a name."""

    NAMES: tuple[str, ...] = ()

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.listeners: list[Heard] = []
        self._begun: list[Any] = []

    @classmethod
    def on(cls, scaler: Any) -> Self:
        """The taps on ``scaler``; new ones where nobody has listened yet."""
        there = vars(scaler).get(cls.NAMES[0])
        return cast("Self", there.taps) if isinstance(there, _Tap) else cls(scaler)

    def add(self, heard: Heard) -> Callable[[], None]:
        """Let a listener hear; what comes back takes it away again, and the taps with the last one."""
        if not self.listeners:
            for name in self.NAMES:
                setattr(self.scaler, name, _Tap(self, name, getattr(self.scaler, name)))
        self.listeners.append(heard)
        return lambda: self._drop(heard)

    def _drop(self, heard: Heard) -> None:
        self.listeners = [other for other in self.listeners if other is not heard]
        if not self.listeners:
            for name in self.NAMES:
                tap = vars(self.scaler).get(name)
                if isinstance(tap, _Tap) and tap.taps is self:
                    tap.take_away()

    def tell(self, event: str, *facts: Any) -> None:
        """Tell ``event`` to those who hear it, in the order in which they came."""
        for heard in tuple(self.listeners):
            if event in heard:
                heard[event](self.scaler, *facts)

    def heard(self, event: str) -> bool:
        """Whether anybody would hear ``event``."""
        return any(event in heard for heard in self.listeners)

    def begin(self, optimizer: Any) -> None:
        """Tell, once an iteration, that an optimizer's gradients are about to be divided."""
        if self.heard("dividing") and not any(other is optimizer for other in self._begun):
            self._begun.append(optimizer)
            self.tell("dividing", optimizer)

    def end(self) -> None:
        """Begin the next iteration, in which every optimizer's gradients are scaled again."""
        self._begun = []


class TorchTaps(Taps):
    """The stand-ins on one of PyTorch's scalers.

    Attributes:
        divided: whether gradients were divided since something was scaled. A fused optimizer divides inside
            its own kernel and leaves its gradients as they are.
    """

    NAMES = ("scale", "unscale_", "step", "update")

    def __init__(self, scaler: Any) -> None:
        super().__init__(scaler)
        self.updates = 0
        self.skips: list[bool] = []
        self.inside_step = False
        self.divided = False

    def on_scale(self, method: Callable[..., Any], outputs: Any) -> Any:
        """Scale; then tell. An iterator is read once, so it is kept for the listeners."""
        if isinstance(outputs, Iterator):
            outputs = list(outputs)
            scaled = method(iter(outputs))
        else:
            scaled = method(outputs)
        self.divided = False
        self.tell("scaled", outputs)
        return scaled

    def on_unscale_(self, method: Callable[..., Any], optimizer: Any) -> Any:
        """Unscale; then tell an overflow, unless ``step`` is the caller and will tell it itself."""
        self.begin(optimizer)
        result = method(optimizer)
        self.divided = True
        if not self.inside_step and self.heard("overflowed"):
            gradients = tuple(gradients_of(optimizer))
            if any_not_finite(gradients):
                self.tell("overflowed", optimizer, gradients)
        return result

    def on_step(self, method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step; then tell a skip."""
        self.begin(optimizer)
        self.inside_step = True
        try:
            with _StepCall(optimizer) as call:
                result = method(optimizer, *args, **kwargs)
        finally:
            self.inside_step = False
        skipped = (self.heard("skipped") or self.heard("updated")) and call.was_skipped()
        self.skips.append(skipped)
        if skipped:
            self.tell("skipped", optimizer, tuple(gradients_of(optimizer, call.grad_scale)))
        return result

    def on_update(self, method: Callable[..., Any], new_scale: Any = None) -> Any:
        """Update; then tell."""
        before = self.scaler.get_scale() if self.heard("updated") else 0.0
        result = method(new_scale)
        index, self.updates = self.updates, self.updates + 1
        skips, self.skips = tuple(self.skips), []
        self.end()
        self.tell("ended", index)
        if self.heard("updated"):
            self.tell("updated", self._update(index, before, skips, new_scale is None))
        return result

    def _update(self, index: int, before: float, skips: tuple[bool, ...], automatic: bool) -> Any:
        """A ScaleUpdate. The scale falls also for an optimizer that was unscaled and never stepped."""
        from lucid.amp._schedule import ScaleUpdate

        after = self.scaler.get_scale()
        overflow = any(skips) or (automatic and after < before)
        return ScaleUpdate(index=index, scale=before, new_scale=after, overflow=overflow, skipped=skips)


class _Tap:
    """Stands in for one method of one scaler. A copy or a pickle of it is the copy's own method."""

    def __init__(self, taps: Taps, name: str, method: Callable[..., Any]) -> None:
        self.taps, self.name, self.method = taps, name, method
        self.was_there = name in vars(taps.scaler)
        # PyTorch's scaler is no part of a compiled graph either; what listeners do must not become one.
        disable: Callable[[Any], Callable[..., Any]] = torch.compiler.disable
        self.around = disable(getattr(taps, f"on_{name}"))
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.taps.listeners or not self.taps.scaler.is_enabled():
            return self.method(*args, **kwargs)
        return self.around(self.method, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.taps.scaler, self.name)

    def take_away(self) -> None:
        """Put back what was there before."""
        if self.was_there:
            setattr(self.taps.scaler, self.name, self.method)
        else:
            delattr(self.taps.scaler, self.name)


class _StepCall:
    """Sees whether a scaler calls ``optimizer.step``, and with which ``found_inf``, by a pre-hook."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.called = False
        self.found_inf: torch.Tensor | None = None
        self.grad_scale: torch.Tensor | None = None
        self.hook: Any = None

    def __enter__(self) -> _StepCall:
        try:
            self.hook = self.optimizer.register_step_pre_hook(self._seen)
        except AttributeError:  # no torch.optim.Optimizer: judged by its gradients instead
            self.hook = None
        return self

    def __exit__(self, *exception: object) -> None:
        if self.hook is not None:
            self.hook.remove()

    def _seen(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.called = True
        self.found_inf = getattr(optimizer, "found_inf", None)
        self.grad_scale = getattr(optimizer, "grad_scale", None)

    def was_skipped(self) -> bool:
        """Whether the step was skipped: one host read where the optimizer is fused, none elsewhere."""
        if self.hook is None:
            return any_not_finite(tuple(gradients_of(self.optimizer)))
        return not self.called or (self.found_inf is not None and bool(self.found_inf))


def gradients_of(optimizer: Any, scale: torch.Tensor | None = None) -> Iterator[SeenGradient]:
    """The gradients of an optimizer or of anything with ``param_groups``, in its order, without a copy."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") if isinstance(group, Mapping) else None
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                name = names[index] if names else f"group {number}, parameter {index}"
                yield SeenGradient(name, parameter, local_values(parameter.grad), scale)


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """The dense values of ``tensor`` that this process holds: a DTensor's shard, a sparse tensor's values."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def any_not_finite(gradients: tuple[SeenGradient, ...]) -> bool:
    """Whether any value is inf or NaN: one pass over the gradients, one host read a device; two where one may be."""
    with torch.no_grad():
        sums = _by_device([gradient.tensor.sum().float() for gradient in gradients])
        if all(torch.isfinite(each).all().item() for each in sums):
            return False
        # A sum may overflow where nothing else does.
        return any(not torch.isfinite(gradient.tensor).all().item() for gradient in gradients)


def _by_device(numbers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers as one tensor a device."""
    devices = dict.fromkeys(number.device for number in numbers)
    return [torch.stack([number for number in numbers if number.device == device]) for device in devices]
