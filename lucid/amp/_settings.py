"""What a scaler is set to, and what a checkpoint keeps of it.

Knows the schedule, scale and count, and who must load the same. Refuses to know gradients and iterations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lucid.amp import _schedule
from lucid.amp._consensus import Consensus
from lucid.amp._division import Divisor
from lucid.amp._schedule import Schedule

_Init = TypeVar("_Init", bound=Callable[..., None])


def without_device(init: _Init) -> _Init:
    """Let a constructor refuse the device that PyTorch's takes, first or by name, in words of its own."""

    @functools.wraps(init)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        """Refuse a device, or construct."""
        device = kwargs.get("device", args[1] if len(args) > 1 else None)
        if isinstance(device, str | torch.device):
            raise TypeError(
                f"GradScaler takes no device, unlike torch.amp.GradScaler: drop {device!r}. The gradients' own devices "
                "are used."
            )
        init(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


class Settings:
    """The part of a scaler that outlives an iteration: its scale, as a number and as what divides."""

    def __init__(
        self, schedule: Schedule, scale: float, growth_tracker: int, enabled: bool, consensus: Consensus
    ) -> None:
        self._enabled = enabled
        self._schedule = schedule
        self._consensus = consensus
        self._divisor = Divisor(scale)
        self._tracker = growth_tracker

    def get_scale(self) -> float:
        """Return the factor that applies: the current scale, a float32 number; 1.0 while disabled."""
        return self._divisor.scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether the scaler scales."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by when it grows."""
        return self._schedule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows: finite and > 1."""
        self._schedule = replace(self._schedule, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by after an overflow."""
        return self._schedule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after an overflow: in (0, 1)."""
        self._schedule = replace(self._schedule, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return how many overflow-free updates in a row make the scale grow."""
        return self._schedule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many overflow-free updates in a row make the scale grow: at least 1."""
        self._schedule = replace(self._schedule, growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its settings and its count as plain numbers, under PyTorch's five keys."""
        return self._schedule.state_dict(self._divisor.scale, self._tracker)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, of this scaler or PyTorch's; all of it or, on an error, nothing.

        Args:
            state_dict: ``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` and
                ``_growth_tracker`` (or ``growth_tracker``). An empty one, which PyTorch's disabled scaler saves,
                is ignored while disabled.

        Raises:
            TypeError, ValueError: a value that the constructor would refuse; a missing or unknown key.
            RuntimeError: an empty dict while enabled; or the ranks of the process group load different values.
        """
        if state_dict == {} and not self._enabled:
            self._consensus.agree_on_load({})
            return
        try:
            schedule, scale, growth_tracker = _schedule.loaded(state_dict)
        except Exception as refusal:
            self._consensus.agree_on_load({}, refusal)
            raise
        self._consensus.agree_on_load(schedule.state_dict(scale, growth_tracker))
        if scale != self._divisor.scale:  # a backward through the same one may be due
            self._divisor.set(scale)
        self._schedule, self._tracker = schedule, growth_tracker

    def __repr__(self) -> str:
        """Return scale, count and settings in one line."""
        state = ", ".join(f"{key.lstrip('_')}={value}" for key, value in self.state_dict().items())
        return f"{type(self).__name__}({state}, enabled={self._enabled})"


def new_scale(given: object) -> float:
    """Return the scale that ``update`` is given, a number or a one-element tensor, rounded once to float32."""
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise ValueError(f"new_scale must be one number, got a tensor of shape {tuple(given.shape)}")
        given = given.item()
    return _schedule.scale("new_scale", given)
