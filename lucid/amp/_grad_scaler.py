"""GradScaler: an iteration of scaled training, told with the files beside it.

Knows the order of things: scale, backward, unscale, step or skip, update. Refuses to know how a scale moves
(``_schedule``), what an optimizer may do next (``_stages``), where gradients are (``_gradients``), how they are
divided (``_division``), and how ranks agree (``_consensus``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from lucid.amp import _gradients, _outputs, _schedule, _settings, _stages
from lucid.amp._clip import Clipping
from lucid.amp._consensus import Consensus
from lucid.amp._events import Events
from lucid.amp._schedule import Schedule
from lucid.amp._settings import Settings
from lucid.amp._stages import READY, STEPPED, Turn
from lucid.amp._unscaling import Unscaling


class GradScaler(Settings, Events):
    r"""Dynamic loss scaling for float16 training.

    Float16 holds nothing below 2⁻²⁴, so small gradients become zero. The scaler multiplies the loss by a
    scale *s*, and with it every gradient, and divides the gradients again before the optimizer steps::

        scale(loss):        return loss · s
        unscale_(optimizer): every gradient ← gradient / s, in float32; did a quotient overflow?
        step(optimizer):    unscale_ unless done; optimizer.step() unless one overflowed
        update():           s ← s · backoff_factor   if any optimizer overflowed,
                            s ← s · growth_factor    after growth_interval updates in a row without,
                            and every optimizer is ready again

    This is dynamic loss scaling as in Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    Args:
        init_scale: the first scale; finite, > 0 and in [2⁻¹²⁶, 2¹²⁷]. Rounded once to float32, as every scale.
        growth_factor: finite and > 1.
        backoff_factor: in (0, 1).
        growth_interval: overflow-free updates in a row until the scale grows; at least 1.
        enabled: False makes a pass-through: ``scale`` returns its input, ``step`` calls the optimizer, ``update``
            does nothing.
        process_group: who decides together where DTensors do not tell: a ``ProcessGroup``, a ``DeviceMesh``,
            several of them, or ``{optimizer: group}``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Example:
        >>> import torch
        >>> from lucid.amp import GradScaler
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler(init_scale=1024.0)
        >>> scaler.scale(weight * 1e-7).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_update.overflow
        False
    """

    @_settings.without_device
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: Any = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be True or False, got {enabled!r} of type {type(enabled).__name__}")
        schedule = Schedule(growth_factor, backoff_factor, growth_interval)
        scale = _schedule.scale("init_scale", init_scale)
        self._begin(schedule, scale, 0, enabled, Consensus(process_group))

    def _begin(self, schedule: Schedule, scale: float, tracker: int, enabled: bool, consensus: Consensus) -> None:
        Settings.__init__(self, schedule, scale, tracker, enabled, consensus)
        Events.__init__(self)
        self._unscaling = Unscaling(self._divisor, self._consensus)

    def scale(self, outputs: Any) -> Any:
        """Multiply outputs by the current scale.

        Args:
            outputs: a floating-point or complex tensor of any shape, or any nesting of lists, tuples,
                namedtuples and mappings of them. A ``None`` stays; a generator becomes a list.

        Returns:
            The same structure. float16 comes back as float32, every other dtype as it was; bfloat16 is multiplied
            in float32 and rounded once. Backward through it before ``update``.

        Raises:
            TypeError: ``outputs`` holds anything else.
            RuntimeError: a device's first use lies inside a CUDA graph capture.
        """
        if not self._enabled:
            return outputs
        if is_dynamo_compiling():
            # All factors are made before the compiler looks for one: it does not see those that are made after that.
            outputs = _outputs.multiplied(outputs, lambda output: self._divisor.prepare(output.device))
            return _outputs.multiplied(outputs, lambda output: self._divisor.traced[output.device])
        if not self._scale_observers:
            return _outputs.multiplied(outputs, self._factor)
        # Multiplies nothing: what a generator yields becomes a list, which can be told, too.
        outputs = _outputs.multiplied(outputs, lambda _: None)
        scaled = _outputs.multiplied(outputs, self._factor)
        self._tell_scaled(outputs)
        return scaled

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the current scale, in place.

        Call it between ``backward`` and ``step`` where the true gradients are needed. Every gradient keeps its
        dtype: float32 and float64 hold the correctly rounded quotient, bfloat16 the float32 quotient rounded once.
        Entries that are not finite stay so; the overflow is noted, and the step will be skipped. No gradient is
        divided twice in an iteration, whoever holds it.

        Args:
            optimizer: a ``torch.optim.Optimizer``, or any object with ``param_groups`` and ``step``.

        Raises:
            RuntimeError: ``unscale_`` or ``step`` already ran for it since the last ``update``; or a gradient is an
                inference tensor.
            ValueError: a gradient is float16, or overlaps another in part.
            NotImplementedError: a gradient is complex.
            TypeError: a gradient has any other dtype or layout that cannot be divided.

        After an error nothing has changed, neither a gradient nor the optimizer's stage.
        """
        if not self._enabled:
            return
        turn = self._stages.of(optimizer)
        turn.may_unscale()
        self._unscaling.unscale(optimizer, turn)

    def clip_grad_norm_(
        self,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        r"""Unscale the optimizer's gradients and clip their total norm, in one multiplication for each.

        What ``unscale_`` followed by ``torch.nn.utils.clip_grad_norm_`` gives, within rounding, with half the
        memory traffic. For everything else it is ``unscale_``: the same errors, the same stage after it.

        Args:
            optimizer: whose gradients are unscaled and clipped.
            max_norm: the largest total norm, ≥ 0, in the units of the true gradients.
            norm_type: the order p of the norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: raise after an overflow instead of leaving it to ``step`` to skip.
            foreach: as in PyTorch; used where the scaler is disabled, else without effect.
            parameters: restricts what the norm is taken of and what is clipped. The optimizer's other gradients
                are unscaled all the same.

        Returns:
            The true total norm before clipping, zero-dimensional; inf or NaN after an overflow, when nothing is
            clipped and the step will be skipped; inf, too, where the norm of finite gradients is beyond the dtype.

        Raises:
            RuntimeError: as ``unscale_``, and after an overflow with ``error_if_nonfinite=True``.
            ValueError: as ``unscale_``; a bad ``max_norm`` or ``norm_type``; a parameter of another optimizer.
            NotImplementedError, TypeError: as ``unscale_``.
        """
        asked = functools.partial(Clipping, max_norm, norm_type, parameters)
        if not self._enabled:
            chosen = asked().parameters
            chosen = _gradients.parameters(optimizer) if chosen is None else chosen
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
        turn = self._stages.of(optimizer)
        turn.may_unscale("clip_grad_norm_")
        clipped = self._unscaling.clip(optimizer, turn, asked)
        if clipped.overflow and error_if_nonfinite:
            raise RuntimeError(
                f"the total norm of order {float(norm_type)} is {clipped.norm.item()}: the gradients overflowed. They "
                "are unscaled and not clipped. Call step(), which will be skipped, or update() to give the iteration "
                "up; error_if_nonfinite=False leaves it to step()."
            )
        return clipped.norm

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients if needed, then step unless they overflowed.

        ``optimizer.step`` is looked up now and is called only when the step lands: on a skip none of its hooks fires
        and none of its state moves. Afterwards the gradients hold their true values either way.

        Args:
            optimizer: the optimizer to step.
            *args: forwarded to ``optimizer.step``.
            **kwargs: forwarded to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned, or None when the step was skipped.

        Raises:
            RuntimeError: ``step`` already ran for it since the last ``update``; or a closure was given: it would run
                ``backward`` again, and nobody would unscale those gradients; or another scaler left a fused optimizer
                its factor.
            ValueError, NotImplementedError, TypeError: as ``unscale_``, if the gradients still need unscaling.
        """
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._stages.remember(optimizer, skipped=False)
            return result
        if args or kwargs:
            _stages.refuse_closure(args, kwargs)
        turn = self._stages.of(optimizer)
        due = turn.stage is READY
        if not due:
            turn.may_step()
            due = self._unscaling.is_due(optimizer, turn)
        if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
            self._unscaling.refuse_left_over(optimizer, due)
        in_kernel = self._unscaling.unscale(optimizer, turn, by_step=True) if due else None
        if self._unscaling.overflowed(turn):
            self._skip(optimizer, turn)
            return None
        if in_kernel is None:
            result = optimizer.step(*args, **kwargs)
        else:
            with self._unscaling.in_kernel(optimizer, turn, in_kernel):
                result = optimizer.step(*args, **kwargs)
        self._stages.landed(optimizer, turn)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale and start the next iteration.

        Backs off if any optimizer's gradients overflowed since the last update, else counts towards growth. Either way
        every optimizer is ready again, so this is also how an iteration is given up. Hooks run last.

        Args:
            new_scale: set the scale to this instead, and restart the count; a number or a one-element tensor.

        Raises:
            TypeError, ValueError: ``new_scale`` is no number, not finite, not > 0 or outside [2⁻¹²⁶, 2¹²⁷].
        """
        if not self._enabled:
            return
        try:
            given = None if new_scale is None else _settings.new_scale(new_scale)
        except Exception as refusal:
            self._consensus.agree_on_update(False, self._divisor.scale, refusal)
            raise
        now, overflow = self._divisor.scale, False
        for turn in self._stages.called:
            # An optimizer that was unscaled and never stepped is read here.
            overflow = overflow or (turn.overflow is not False and self._unscaling.overflowed(turn))
        if self._consensus.spreads:
            overflow = self._consensus.agree_on_update(overflow, given or now)
        after, tracker = (given, 0) if given else self._schedule.next(now, self._tracker, overflow)
        skipped = self._stages.clear()
        self._unscaling.divided.clear()
        if after != now:
            self._divisor.set(after)
        self._tracker = tracker
        self._note_update(now, after, overflow, skipped, given is not None)

    def _factor(self, output: Tensor) -> Tensor:
        """Return the scale on an output's device, and remember the output."""
        factor = self._divisor.tensors[output.device, torch.float32]
        if type(factor) is Tensor:  # else it is fake, and its output no loss of this iteration
            self._scaled.append(weakref.ref(output))
        return factor

    def _skip(self, optimizer: Any, turn: Turn) -> None:
        first = not any(other.stage is STEPPED and other.skipped for other in self._stages.called)
        turn.stage, turn.skipped = STEPPED, True
        self._tell_skipped(optimizer, _gradients.named(optimizer), self._divisor.scale, first)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickling and copying keep: settings, scale and count."""
        if self._stages.in_progress():
            raise RuntimeError(
                "a GradScaler cannot be pickled or copied in the middle of an iteration. Call update() first."
            )
        return {"enabled": self._enabled, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up settings, scale and count; hooks, process groups and answers start empty."""
        self._begin(*_schedule.loaded(state["state"]), state["enabled"], Consensus())
