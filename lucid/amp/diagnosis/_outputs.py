"""Measure the gradients at modules' outputs, in one forward of many.

Knows hooks and the measures they leave. Between two measured forwards there is no hook on any module. Refuses
to know what a measure says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lucid.amp.diagnosis._models import module_names
from lucid.amp.diagnosis._spread import Measure
from lucid.amp.diagnosis._trees import tensors_in

__all__ = ["Measured", "Outputs"]


class Measured(NamedTuple):
    """A module's output and its gradient.

    Attributes:
        name: of the module.
        shape: of the output.
        largest: the largest magnitude of the output, on its device.
        gradient: how the magnitudes of its gradient are spread.
        scale: what the gradient is multiplied by.
    """

    name: str
    shape: tuple[int, ...]
    largest: Tensor
    gradient: Measure
    scale: float


class Outputs:
    """Measures every N-th forward of a model.

    Args:
        model: the module inside all wrappers.
        every: N; 0 for never.
        scale: asked for the scale in force, once between two updates.
    """

    def __init__(self, model: nn.Module, every: int, scale: Callable[[], float]) -> None:
        self._model, self._every, self._scale = model, every, scale
        self._in_force: float | None = None
        self._forwards = 0
        self._hooks: list[Any] = []
        self._measures: dict[str, Measured] = {}
        self._order: dict[str, None] = {}
        self._last: Callable[[], Tensor | None] = lambda: None

    def before(self) -> None:
        """A forward begins: hook the modules if it is to be measured."""
        self.after()  # of a forward that raised
        wanted = self._every and self._forwards % self._every == 0
        self._forwards += 1
        if wanted:
            self._measures, self._order, self._in_force = {}, {}, None
            for module, name in module_names(self._model).items():
                if not isinstance(module, torch.jit.ScriptModule):
                    self._hooks.append(module.register_forward_hook(self._hook(name)))

    def again(self) -> None:
        """Measure the next forward, whatever its number, and every N-th from there."""
        self._forwards = 0

    def after(self) -> None:
        """A forward ended: take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def updated(self) -> None:
        """The scale may be another from now on."""
        self._in_force = None

    def measured(self) -> list[Measured]:
        """The modules whose output had a gradient in the latest measured forward, in forward order."""
        return [self._measures[name] for name in self._order if name in self._measures]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            """Attend to the first tensor that will have a gradient."""
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.is_floating_point() and tensor.numel():
                    # A module that hands on what its last submodule put out has no output of its own.
                    if tensor is not self._last():
                        self._attend(name, tensor)
                    return

        return hook

    def _attend(self, name: str, output: Tensor) -> None:
        """Measure the output's gradient when it comes. Of several calls of one module the last one counts."""
        largest = output.detach().abs().amax().float()
        self._order[name] = None
        self._last = weakref.ref(output)

        def measure(gradient: Tensor) -> None:
            """Measure, and leave the gradient as it is."""
            # The first to come belongs to the last call.
            if name not in self._measures:
                if self._in_force is None:
                    self._in_force = self._scale()
                self._measures[name] = Measured(name, tuple(gradient.shape), largest, Measure(gradient), self._in_force)

        hook: Callable[[Callable[[Tensor], None]], Any] = output.register_hook
        hook(measure)
