"""Half in, float32 in between, one rounding out.

Knows how to run an operator on float32 copies without autocast casting them back, forward and backward, and
how to replay any operator whose backward has no formula here. Refuses to know which operators there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

Call = Callable[[Sequence[Tensor]], Any]


class uncast:
    """A scope in which autocast leaves the processor's operators alone; cheaper than PyTorch's own."""

    __slots__ = ("_was",)

    def __enter__(self) -> None:
        """Remember whether autocast was on, and turn it off."""
        self._was = torch.is_autocast_enabled("cpu")
        if self._was:
            torch.set_autocast_enabled("cpu", False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Turn it on again where it was."""
        if self._was:
            torch.set_autocast_enabled("cpu", True)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd function, which PyTorch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


class Replay(torch.autograd.Function):
    """Any operator: saves its half operands only, and runs it once more to differentiate it.

    Forward arguments: the operator as a function of a sequence of tensors, the floating ones in float32;
    the dtype its outputs are rounded to; the generator's state before it, if it draws numbers; its operands.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, dtype: torch.dtype, random: Tensor | None, *operands: Tensor) -> Any:
        """Run the operator in float32 and round its outputs once."""
        ctx.call = call
        ctx.random = random
        ctx.save_for_backward(*operands)
        with uncast():
            result = call([_widened(operand) for operand in operands])
        if isinstance(result, Tensor):
            return result.to(dtype)
        return tuple(output.to(dtype) for output in result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Differentiate a second run of the operator; twice differentiable."""
        operands: tuple[Tensor, ...] = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        again = torch.is_grad_enabled()
        with uncast(), torch.enable_grad(), _drawing_from(ctx.random):
            wide = [_leaf(o, need, again) for o, need in zip(operands, needed, strict=True)]
            result = ctx.call(wide)
            outputs = (result,) if isinstance(result, Tensor) else result
            reached = [(o, g.to(o.dtype)) for o, g in zip(outputs, gradients, strict=True) if g is not None]
            found = torch.autograd.grad(
                [output for output, _ in reached],
                [w for w, need in zip(wide, needed, strict=True) if need],
                [gradient for _, gradient in reached],
                create_graph=again,
                allow_unused=True,
            )
        narrow = iter(found)
        grads = (next(narrow) if need else None for need in needed)
        rounded = (g if g is None else g.to(o.dtype) for g, o in zip(grads, operands, strict=True))
        return (None, None, None, *rounded)


class Kept(torch.autograd.Function):
    """As ``Replay``, but keeps what the float32 operator saved: quicker, in float32's memory; for once only."""

    @staticmethod
    def forward(ctx: Any, call: Call, dtype: torch.dtype, *operands: Tensor) -> Any:
        """Run the operator in float32, remember how, and round its outputs once."""
        needed = ctx.needs_input_grad[2:]
        ctx.dtypes = [operand.dtype for operand in operands]
        with uncast(), torch.enable_grad():
            wide = [_leaf(o, need, differentiable=False) for o, need in zip(operands, needed, strict=True)]
            ctx.kept = wide, call(wide)
        return tuple(output.detach().to(dtype) for output in ctx.kept[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Differentiate what was kept."""
        wide, outputs = ctx.kept
        reached = [(o, g.float()) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        with uncast():
            found = torch.autograd.grad(
                [output for output, _ in reached],
                [w for w in wide if w.requires_grad],
                [gradient for _, gradient in reached],
                retain_graph=True,
                allow_unused=True,
            )
        narrow = iter(found)
        grads = (next(narrow) if w.requires_grad else None for w in wide)
        rounded = (g if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True))
        return (None, None, *rounded)


def _widened(operand: Tensor) -> Tensor:
    return operand.float() if operand.is_floating_point() else operand


def _leaf(operand: Tensor, needed: bool, differentiable: bool) -> Tensor:
    if not needed:
        return _widened(operand)
    if differentiable:
        # What is float32 already gets a place of its own in the graph, to differentiate to.
        return operand.float() if operand.dtype is not torch.float32 else operand.view_as(operand)
    return operand.detach().float().requires_grad_()


@contextlib.contextmanager
def _drawing_from(random: Tensor | None) -> Iterator[None]:
    """Draw from a remembered generator state; afterwards as if nothing had been drawn."""
    if random is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random)
        yield
