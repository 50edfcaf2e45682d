"""An optimizer that steps past its scaler, on gradients that are still multiplied by the scale: shown, not supposed.

Knows which backward passes left an optimizer's gradients, and whether anything has touched these since. Refuses to
tell of an optimizer about which one of its three questions is open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lucid.amp import _torch
from lucid.amp._meshes import parameters_of
from lucid.amp.diagnosis._trees import tensors_in

TRIES = 3
"""So many iterations are looked at closely; where none of them shows it, the optimizer is left alone."""

BACKWARDS = 16
"""Of so many scaled losses at most the graphs are kept until the step."""

NODES = 100_000
"""A graph is searched this far."""


class Suspect:
    """An optimizer that was stepped while a scaled loss had been run backward, and by no scaler.

    It is shown where the scaled losses reach its parameters, where each of these got a gradient from every such
    backward and from no other, and where nothing changed the gradients before its step had ended.

    Attributes:
        times: how often it stepped so.
        shown: whether the three were seen together, once.
    """

    def __init__(self, optimizer: Any) -> None:
        self.name = type(optimizer).__name__
        self.find: Callable[[], Any] = weakref.ref(optimizer)
        self.times = 0
        self.shown = False
        self._tries = 0
        self._nodes: list[Any] = []
        self._backwards = 0
        self._left: dict[int, list[tuple[weakref.ref[Tensor], int | None]]] = {}
        self._hooks: list[Any] = []

    def on_scaled(self, outputs: Any) -> None:
        """Look closely at this backward, unless it was shown before, or not shown often enough."""
        if self.shown or self._tries >= TRIES:
            return
        if not self._hooks:
            self._tries += 1
            for parameter in parameters_of(self.find()):
                if parameter.requires_grad and parameter.is_leaf:
                    hook: Callable[[Any], Any] = parameter.register_post_accumulate_grad_hook
                    self._hooks.append(hook(self._accumulated))
        for output in tensors_in(outputs):
            if len(self._nodes) == BACKWARDS:
                self.forget()
                self._tries = TRIES
                return
            if output.requires_grad and output.grad_fn is not None:
                self._nodes.append(output.grad_fn)
                register: Callable[[Any], Any] = output.register_hook
                self._hooks.append(register(self._began))

    def _began(self, gradient: Tensor) -> None:
        self._backwards += 1

    def _accumulated(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            left = weakref.ref(gradient), _torch.version(gradient)
            self._left.setdefault(id(parameter), []).append(left)

    def on_stepped(self) -> None:
        """It has stepped: count it, and judge what was seen of this iteration."""
        self.times += 1
        if self._hooks:
            self.shown = self._is_shown()
            self.forget()

    def _is_shown(self) -> bool:
        mine = {id(one): one for one in parameters_of(self.find()) if one.grad is not None}
        left = {key: self._left.get(key, []) for key in mine}
        untouched = all(
            len(each) == self._backwards
            and each[-1][0]() is mine[key].grad
            and each[-1][1] == _torch.version(each[-1][0]())  # type: ignore[arg-type]
            for key, each in left.items()
        )
        return bool(mine) and self._backwards > 0 and untouched and mine.keys() <= set(_reached_by(self._nodes))

    def forget(self) -> None:
        """End the close look."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes, self._backwards, self._left = [], [], 0, {}


def _reached_by(nodes: list[Any]) -> Iterator[int]:
    """The ids of the leaves that a backward from these nodes would reach."""
    waiting = list(nodes)
    met: set[Any] = set()
    while waiting and len(met) < NODES:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield id(leaf)
        waiting += [following for following, _ in node.next_functions]
