"""lucid's scaler behind the interface of PyTorch's, for scripts that were written for that one.

Knows the order of PyTorch's arguments (``device`` first) and the private names of its scaler that fused
optimizers and trainers call. Refuses to know how anything is scaled: that is ``GradScaler``'s.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lucid._warning import warn
from lucid.amp import GradScaler
from lucid.amp._stages import Stage
from lucid.amp.cli.run._states import States

__all__ = ["PyTorchScaler", "swapped"]


class PyTorchScaler(GradScaler):
    """``lucid.amp.GradScaler``, to be made and used as ``torch.amp.GradScaler``.

    Args:
        device: kept and given back; lucid works on the gradients' own devices. As in PyTorch, ``"cuda"`` without
            CUDA is a disabled scaler and a warning.
        init_scale: as lucid's, and so are the other arguments.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: Any = None,
    ) -> None:
        if enabled and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            warn("GradScaler is enabled, but CUDA is not available.  Disabling.")
            enabled = False
        self._device, self._init_scale, self._init_growth_tracker = device, init_scale, 0
        self._found: dict[int, dict[torch.device, Tensor]] = {}
        self._known: dict[int, Any] = {}
        super().__init__(
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            bool(enabled),
            process_group=process_group,
        )

    # What a step does beyond lucid's: it heeds a verdict that the script has changed.

    def unscale_(self, optimizer: Any) -> None:
        """As ``GradScaler.unscale_``."""
        self._known[id(optimizer)] = optimizer
        super().unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``GradScaler.step``; skipped, too, where the script set a flag of ``_found_inf_per_device``.

        Trainers reduce those flags over ranks in place, and PyTorch's ``step`` obeys what they hold then.
        """
        self._known[id(optimizer)] = optimizer
        flags = self._found.get(id(optimizer), {})
        turn = self._stages.of(optimizer)
        if flags and turn.stage is Stage.READY and self._enabled:
            super().unscale_(optimizer)
        if turn.stage is Stage.UNSCALED and any(flag.item() for flag in flags.values()):
            turn.overflow = True
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As ``GradScaler.update``."""
        self._found.clear()
        self._known.clear()
        super().update(new_scale)

    # PyTorch's private names.

    @property
    def _scale(self) -> Tensor:
        """The scale as a tensor, for reading; one that is assigned becomes the scale."""
        return torch.full((), self._divisor.scale, device=self._device_there())

    @_scale.setter
    def _scale(self, scale: Tensor) -> None:
        self.load_state_dict({**self.state_dict(), "scale": float(scale)})

    @property
    def _growth_tracker(self) -> Tensor:
        count = self.state_dict()["_growth_tracker"]
        return torch.full((), count, dtype=torch.int32, device=self._device_there())

    @_growth_tracker.setter
    def _growth_tracker(self, count: Tensor) -> None:
        self.load_state_dict({**self.state_dict(), "_growth_tracker": int(count)})

    _growth_factor = property(GradScaler.get_growth_factor, GradScaler.set_growth_factor)
    _backoff_factor = property(GradScaler.get_backoff_factor, GradScaler.set_backoff_factor)
    _growth_interval = property(GradScaler.get_growth_interval, GradScaler.set_growth_interval)

    @property
    def _per_optimizer_states(self) -> States:
        return States(self)

    def _get_scale_async(self) -> Tensor:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return int(self.state_dict()["_growth_tracker"])

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._scale, self._growth_tracker

    def _lazy_init_scale_growth_tracker(self, device: Any) -> None:
        """There is nothing to make: scale and count are always there."""

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """A flag a device, 1.0 where a gradient there is not finite; ``step`` obeys what it holds later."""
        self._known[id(optimizer)] = optimizer
        flags: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                    bad = (~values.isfinite().all()).float()
                    flags[bad.device] = torch.maximum(flags.get(bad.device, bad), bad)
        self._found[id(optimizer)] = flags
        return flags

    def _found_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """The flags of a call of ``unscale_`` in this iteration; empty before it, as in PyTorch."""
        if id(optimizer) not in self._found and self._stages.of(optimizer).stage is not Stage.READY:
            self._check_inf_per_device(optimizer)
        return self._found.get(id(optimizer), {})

    def _device_there(self) -> str:
        """The device that was named, or the CPU where this machine has none of that kind."""
        return self._device if self._enabled else "cpu"

    def __getstate__(self) -> dict[str, Any]:
        """What lucid keeps, and PyTorch's device."""
        return {**super().__getstate__(), "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up what ``__getstate__`` gave."""
        super().__setstate__(state)
        self._device, self._init_scale, self._init_growth_tracker = state["device"], self.get_scale(), 0
        self._found, self._known = {}, {}


class WithoutDevice(PyTorchScaler):
    """As ``torch.cuda.amp.GradScaler`` and ``torch.cpu.amp.GradScaler``, whose classes name the device."""

    kind = "cuda"

    def __init__(self, *numbers: Any, **named: Any) -> None:
        super().__init__(self.kind, *numbers, **named)


class CPUScaler(WithoutDevice):
    """As ``torch.cpu.amp.GradScaler``."""

    kind = "cpu"


class ShardedScaler(PyTorchScaler):
    """As FSDP's ``ShardedGradScaler``, whose factors come in the other order and which knows its ranks."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        group = process_group
        if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            group = torch.distributed.group.WORLD
        numbers = (device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        super().__init__(*numbers, process_group=group)


# Where PyTorch shows its scalers: module, name, what stands in.
PLACES = (
    ("torch", "GradScaler", PyTorchScaler),
    ("torch.amp", "GradScaler", PyTorchScaler),
    ("torch.amp.grad_scaler", "GradScaler", PyTorchScaler),
    ("torch.cuda.amp", "GradScaler", WithoutDevice),
    ("torch.cuda.amp.grad_scaler", "GradScaler", WithoutDevice),
    ("torch.cpu.amp", "GradScaler", CPUScaler),
    ("torch.cpu.amp.grad_scaler", "GradScaler", CPUScaler),
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler", ShardedScaler),
)


@contextlib.contextmanager
def swapped() -> Iterator[None]:
    """For a block: who asks PyTorch for a scaler gets lucid's."""
    if torch.distributed.is_available():
        importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler")  # loaded late, by FSDP itself

    undo = []
    for place, name, ours in PLACES:
        if (module := sys.modules.get(place)) is not None and hasattr(module, name):
            undo.append((module, name, getattr(module, name)))
            setattr(module, name, ours)
    try:
        yield
    finally:
        for module, name, theirs in reversed(undo):
            setattr(module, name, theirs)
