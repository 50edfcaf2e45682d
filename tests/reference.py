"""The specification once more: slow, obvious, on NumPy arrays and Python floats.

Knows the rules of loss scaling. Knows neither PyTorch nor the package: whatever the two agree on was written
down twice.
"""

import math
import struct

import numpy as np

DIVISION = {"bfloat16": np.float32, "float32": np.float32, "float64": np.float64}
REFUSAL = {"float16": ValueError, "complex64": NotImplementedError}


def float32(number: float) -> float:
    """The nearest float32, as a Python float."""
    return struct.unpack("f", struct.pack("f", number))[0]


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 values rounded to bfloat16, to nearest and ties to even, held in float32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(math.nan), rounded)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Real values as a tensor of that dtype holds them."""
    with np.errstate(all="ignore"):
        return bfloat16(values) if dtype == "bfloat16" else np.real(values.astype(dtype))


def quotient(values: np.ndarray, dtype: str, scale: float) -> np.ndarray:
    """Values over the scale, in the dtype of the division, each correctly rounded."""
    number = DIVISION[dtype]
    with np.errstate(all="ignore"):
        return values.astype(number) / number(scale)


class Grad:
    """One gradient: what it holds, and whether this iteration divided it already."""

    def __init__(self, values: np.ndarray, dtype: str) -> None:
        self.values, self.dtype, self.divided = values, dtype, False


class Optimizer:
    """Gradient descent with a learning rate of 1, and where it stands in the iteration."""

    def __init__(self, parameters: list[int]) -> None:
        self.parameters = parameters
        self.stage, self.overflow, self.last_skipped, self.steps = "ready", False, None, 0


class Reference:
    """What a GradScaler does, rule by rule."""

    def __init__(self, scale: float, growth: float, backoff: float, interval: int) -> None:
        self.scale, self.growth, self.backoff, self.interval = float32(scale), growth, backoff, interval
        self.count = self.index = 0
        self.grads: dict[int, Grad] = {}
        self.turns: list[Optimizer] = []
        self.last_update = None

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide every gradient by the scale once, and note whether a quotient is not finite."""
        if optimizer.stage != "ready":
            raise RuntimeError
        held = [self.grads[p] for p in optimizer.parameters if p in self.grads]
        for grad in held:
            if grad.dtype in REFUSAL:
                raise REFUSAL[grad.dtype]
        for grad in held:
            value = grad.values if grad.divided else quotient(grad.values, grad.dtype, self.scale)
            optimizer.overflow |= not np.isfinite(value).all()
            grad.values, grad.divided = stored(value, grad.dtype), True
        optimizer.stage = "unscaled"
        self.turns.append(optimizer)

    def step(self, optimizer: Optimizer, closure: bool = False) -> bool:
        """Unscale if needed; whether the step lands."""
        if closure or optimizer.stage == "stepped":
            raise RuntimeError
        if optimizer.stage == "ready":
            self.unscale_(optimizer)
        optimizer.stage, optimizer.last_skipped = "stepped", optimizer.overflow
        optimizer.steps += not optimizer.overflow
        return not optimizer.overflow

    def update(self, new_scale: float | None = None) -> None:
        """Back off after an overflow, grow after enough updates without one, and make everyone ready."""
        overflow, old = any(turn.overflow for turn in self.turns), self.scale
        if new_scale is not None:
            self.scale, self.count = float32(new_scale), 0
        elif overflow:
            self.scale, self.count = float32(max(old * self.backoff, 2.0**-126)), 0
        elif self.count + 1 >= self.interval:
            self.scale, self.count = float32(min(old * self.growth, 2.0**127)), 0
        else:
            self.count += 1
        skipped = tuple(turn.stage == "stepped" and turn.overflow for turn in self.turns)
        self.last_update = (self.index, old, self.scale, overflow, skipped)
        for turn in self.turns:
            turn.stage, turn.overflow = "ready", False
        for grad in self.grads.values():
            grad.divided = False
        self.turns, self.index = [], self.index + 1
