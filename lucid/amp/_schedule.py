"""How the scale moves: growth, backoff and the bounds of a scale.

Knows numbers. Refuses to know tensors, optimizers and processes: it imports the standard library alone,
so that any front end can stand on it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SMALLEST = 2.0**-126
"""The smallest normal float32. Below it a division by the scale is no longer exact at powers of two."""

LARGEST = 2.0**127
"""The largest power of two in float32; its reciprocal is still above zero."""


@dataclass(frozen=True)
class Schedule:
    """The specification's schedule: back off on an overflow, grow after a row of overflow-free updates.

    Attributes:
        growth_factor: finite and > 1; the scale is multiplied by it after ``growth_interval`` good updates.
        backoff_factor: in (0, 1); the scale is multiplied by it after an overflow.
        growth_interval: at least 1; in updates.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int

    def __post_init__(self) -> None:
        """Validate all three, and keep them as Python's own numbers."""
        checked = (
            ("growth_factor", growth_factor(self.growth_factor)),
            ("backoff_factor", backoff_factor(self.backoff_factor)),
            ("growth_interval", growth_interval(self.growth_interval)),
        )
        for name, value in checked:
            object.__setattr__(self, name, value)

    def next(self, scale: float, growth_tracker: int, overflow: bool) -> tuple[float, int]:
        """Return scale and count after one more update.

        Args:
            scale: the scale until then.
            growth_tracker: the overflow-free updates since it last moved.
            overflow: whether this update follows an overflow.
        """
        if overflow:
            return bounded(scale * self.backoff_factor), 0
        if growth_tracker + 1 >= self.growth_interval:
            return bounded(scale * self.growth_factor), 0
        return scale, growth_tracker + 1

    def state_dict(self, scale: float, growth_tracker: int) -> dict[str, Any]:
        """Return settings, scale and count as plain numbers, under the five keys that PyTorch uses."""
        return {
            "scale": scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": growth_tracker,
        }


@dataclass(frozen=True)
class ScaleUpdate:
    """What one ``update()`` did.

    Attributes:
        index: how many updates this scaler had made before; the first one is 0.
        scale: the scale of the iteration that ended.
        new_scale: the scale from now on.
        overflow: whether any optimizer's gradients overflowed in that iteration.
        skipped: for each optimizer of that iteration, in the order of their first calls, whether its ``step``
            was skipped.
    """

    index: int
    scale: float
    new_scale: float
    overflow: bool
    skipped: tuple[bool, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of plain values, for loggers and JSON (``skipped`` becomes a list)."""
        return {**asdict(self), "skipped": list(self.skipped)}


def bounded(scale: float) -> float:
    """Return ``scale`` (> 0, or infinite) moved to the nearer bound if it is outside, rounded to float32."""
    return _float32(min(max(scale, SMALLEST), LARGEST))


def scale(name: str, value: object) -> float:
    """Return a scale that a user gave, rounded once to float32.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: it is not finite, not > 0, or outside [2**-126, 2**127].
    """
    number = _real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")
    if not SMALLEST <= number <= LARGEST:
        raise ValueError(f"{name} must lie in [2**-126, 2**127], the normal float32 range, got {value!r}")
    return _float32(number)


def growth_factor(value: object) -> float:
    """Return a validated growth factor: finite and > 1."""
    number = _real("growth_factor", value)
    if not (math.isfinite(number) and number > 1):
        raise ValueError(f"growth_factor must be finite and > 1, got {value!r}")
    return number


def backoff_factor(value: object) -> float:
    """Return a validated backoff factor: in (0, 1)."""
    number = _real("backoff_factor", value)
    if not 0 < number < 1:
        raise ValueError(f"backoff_factor must lie in (0, 1), got {value!r}")
    return number


def growth_interval(value: object) -> int:
    """Return a validated growth interval: a whole number of updates, at least 1."""
    return _whole("growth_interval", value, least=1)


def growth_tracker(value: object) -> int:
    """Return a validated count of overflow-free updates: a whole number, at least 0."""
    return _whole("growth_tracker", value, least=0)


def loaded(state_dict: object) -> tuple[Schedule, float, int]:
    """Return the schedule, scale and count that a state dict holds, all of it validated.

    ``growth_tracker`` is read for ``_growth_tracker``.

    Raises:
        RuntimeError: it is empty, as PyTorch's disabled scaler saves it.
        TypeError, ValueError: a key is missing or unknown, or a value would be refused by the constructor.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict must be a dict, got {type(state_dict).__name__}. Pass what a scaler's state_dict() returned."
        )
    if not state_dict:
        raise RuntimeError(
            "the state dict is empty: a disabled torch.amp.GradScaler saves that. Start with a fresh scaler instead "
            "of loading it, or load it into a disabled one."
        )
    values: dict[Any, Any] = {_NAMES.get(key, key): value for key, value in state_dict.items()}
    if len(values) < len(state_dict):
        raise ValueError("the state dict holds both 'growth_tracker' and '_growth_tracker'. Nothing was loaded.")
    # Whoever passes a whole checkpoint is told where in it the scaler's part seems to be.
    within = [key for key, value in values.items() if isinstance(value, Mapping) and "growth_interval" in value]
    _refuse_keys("misses", [key for key, name in _NAMES.items() if name not in values], within)
    _refuse_keys("holds unknown keys:", values.keys() - set(_NAMES.values()), within)
    for name in ("growth_interval", "growth_tracker"):
        values[name] = _whole_if_equal(values[name])
    now, tracker = scale("scale", values.pop("scale")), growth_tracker(values.pop("growth_tracker"))
    return Schedule(**values), now, tracker


def _refuse_keys(how: str, keys: Collection[object], within: Sequence[object]) -> None:
    if keys:
        names = ", ".join(sorted(map(repr, keys)))
        part = f"its {within[0]!r}, which looks like a scaler's" if within else "what state_dict() returned"
        raise ValueError(f"the state dict {how} {names}. Pass {part}. Nothing was loaded.")


_NAMES: dict[Any, str] = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}
"""The key under which PyTorch saves a value → how it is called here; both are read."""


def _whole_if_equal(value: object) -> Any:
    """Return an int for a float such as 2000.0, which is what JSON may make of an int; else ``value``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return number


def _float32(number: float) -> float:
    """Return a number of float32's normal range rounded to its 24 binary digits, half to even."""
    digits, exponent = math.frexp(number)
    return math.ldexp(round(digits * 2**24), exponent - 24)
