"""Run a forward again, under no_grad, and look at what goes into and comes out of each module.

Knows modules and hooks; finds the first module, in the order of execution, whose output is not finite, or the
code between two modules that made it so. Leaves weights, buffers, attributes, hooks and random state as they
were. Refuses to know why somebody asks, and what scale was in force.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lucid.amp.diagnosis._extents import Extent, extent_of
from lucid.amp.diagnosis._models import module_names
from lucid.amp.diagnosis._snapshot import Surroundings, unchanged
from lucid.amp.diagnosis._trees import tensors_in, with_tensors

__all__ = ["Origin", "Replay", "fingerprint", "replay"]


@dataclass(frozen=True)
class Origin:
    """Where values stopped being finite in a forward.

    Attributes:
        module: the module's name in the model, ``""`` for the model itself.
        type: the name of its class.
        inside: whether the module's own operators did it; False where it got a batch that was not finite.
        before: the submodule that was about to run when the module's own code had already done it, or None.
        inputs: what went into the module (or, with ``before``, into that submodule).
        weight: its parameters, those of its submodules among them.
        output: what came out; None with ``before``.
        in_float32: the largest magnitude of the output when the same inputs are computed in float32; inf or
            NaN if that is not finite either; None where it could not be tried.
    """

    module: str
    type: str
    inside: bool
    inputs: Extent
    weight: Extent
    output: Extent | None = None
    before: str | None = None
    in_float32: float | None = None


@dataclass
class Replay:
    """What a replay saw.

    Attributes:
        batch: the model's inputs.
        order: the names of the modules, in the order in which they finished.
        origin: where values stopped being finite; None if they stayed so to the end.
        silent: the modules whose output was zero throughout, in that order.
        print: one number for each of the first tensors of the model's output.
        error: why the replay did not end, or None.
    """

    batch: Extent = field(default_factory=Extent)
    order: list[str] = field(default_factory=list)
    origin: Origin | None = None
    silent: list[str] = field(default_factory=list)
    print: list[float] = field(default_factory=list)
    error: str | None = None


def replay(model: nn.Module, inputs: tuple[Any, Any], surroundings: Surroundings) -> Replay:
    """Run ``model(*args, **kwargs)`` once more and look.

    Args:
        model: a module; what is compiled of it runs uncompiled.
        inputs: ``(args, kwargs)`` of the forward.
        surroundings: the random state and autocast of that forward.

    Returns:
        What was seen. An exception in the forward is an ``error`` in it: a diagnosis ends no training.
    """
    seen = Replay()
    args, kwargs = inputs
    try:
        with unchanged(model), _step_by_step(), surroundings.restored(), torch.no_grad():
            look = _Look(model)
            output = model(*args, **kwargs)
            seen.print = [number.item() for number in fingerprint(output)]
        seen.batch, seen.order, seen.silent = look.batch, look.order, look.silent
        seen.origin = look.origin()
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


@contextlib.contextmanager
def _step_by_step() -> Iterator[None]:
    """No compiled code, and no fused path that a module takes only where no gradient is wanted."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def fingerprint(output: Any, at_most: int = 4) -> list[Tensor]:
    """A number for each of the first floating-point tensors, by which two runs are compared; nothing is read."""
    floating = (tensor.detach() for tensor in tensors_in(output) if tensor.is_floating_point())
    return [tensor.sum(dtype=torch.float32) for tensor in itertools.islice(floating, at_most)]


@dataclass
class _Call:
    """One call of a module: what went in and out, and what of it was not finite first."""

    module: nn.Module
    parent: _Call | None
    inputs: Extent
    output: Extent | None = None
    in_float32: float | None = None


class _Look:
    """Hooks on every module of a model; they are taken away with everything else that ``unchanged`` undoes."""

    def __init__(self, model: nn.Module) -> None:
        self.names = module_names(model)
        self.batch = Extent()
        self.order: list[str] = []
        self.silent: list[str] = []
        self._open: list[_Call] = []
        self._suspects: list[tuple[_Call, _Call | None]] = []
        self._aside = False
        for module in self.names:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    def origin(self) -> Origin | None:
        """The first place whose values were not finite and that nothing behind it made finite again."""
        for call, before in self._suspects:
            if _stays_broken(call):
                return self._told(call, before)
        return None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._aside:
            return
        parent = self._open[-1] if self._open else None
        call = _Call(module, parent, extent_of(tensors_in((args, kwargs))))
        if parent is None:
            self.batch = call.inputs
        elif call.inputs.broken and not parent.inputs.broken:
            self._suspects.append((parent, call))
        self._open.append(call)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._aside:
            return
        call = self._open.pop()
        while call.module is not module:  # a call that an exception ended was never left
            call = self._open.pop()
        call.output = extent_of(tensors_in(output))
        self.order.append(self.names[module])
        if not call.output.finite:
            call.in_float32 = self._in_float32(module, args, kwargs)
            self._suspects.append((call, None))
        if call.output.elements and call.output.zero == call.output.elements:
            self.silent.append(self.names[module])

    def _in_float32(self, module: nn.Module, args: Any, kwargs: Any) -> float | None:
        """The largest magnitude of a module's output in float32; inf or NaN where that is not finite either."""
        if any(not call.output.masking for call, _ in self._suspects if call.output):
            return None  # something before it is to blame
        kind = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
        self._aside = True
        try:
            with torch.autocast(kind, enabled=False):
                output = module.forward(*with_tensors(args, _widened), **with_tensors(kwargs, _widened))
        except Exception:  # a module that insists on half precision: then nobody can tell
            return None
        finally:
            self._aside = False
        extent = extent_of(tensors_in(output))
        return math.nan if extent.nan else math.inf if extent.inf else extent.largest

    def _told(self, call: _Call, before: _Call | None) -> Origin:
        weight = extent_of(call.module.parameters())
        inputs = before.inputs if before else call.inputs
        return Origin(
            module=self.names[call.module],
            type=type(call.module).__name__,
            inside=not call.inputs.broken,
            inputs=inputs,
            weight=weight,
            output=None if before else call.output,
            before=self.names[before.module] if before else None,
            in_float32=call.in_float32,
        )


def _stays_broken(call: _Call) -> bool:
    """Whether the call's values stayed broken: a -inf that a softmax then turns into 0 was meant so."""
    if call.output is None or call.output.broken:
        return True
    parent = call.parent
    return parent is None or parent.output is None or not parent.output.finite


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
