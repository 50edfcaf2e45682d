"""Products of matrices: linear, matmul, and the sums with a product.

Knows the two formulas of a product's gradients. Refuses to know convolutions, attention and recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lucid.amp._half._operands import Operands, are_plain
from lucid.amp._half._wide import apply, uncast


def _left(gradient: Tensor, right: Tensor, shape: torch.Size) -> Tensor:
    """∂(A·B)/∂A applied to a gradient, in float32, summed over the batches that A was broadcast over."""
    return torch.matmul(gradient, right.transpose(-1, -2)).sum_to_size(shape)


def _right(left: Tensor, gradient: Tensor, shape: torch.Size) -> Tensor:
    return torch.matmul(left.transpose(-1, -2), gradient).sum_to_size(shape)


def _rows(tensor: Tensor) -> Tensor:
    """All leading dimensions as one: a vector is one row."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


class Linear(torch.autograd.Function):
    """x·Wᵀ + b of half operands: x (..., in), W (out, in), b (out) or None → (..., out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Accumulate in float32 and round once."""
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        with uncast():
            wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
            return wide.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """g·W, gᵀ·x and the sum of g, each rounded once."""
        x, weight = ctx.saved_tensors
        grads: list[Tensor | None] = [None, None, None]
        half = gradient.dtype
        with uncast():
            wide = gradient.float()
            rows = _rows(wide)
            if ctx.needs_input_grad[0]:
                grads[0] = torch.matmul(wide, weight.float()).to(half)
            if ctx.needs_input_grad[1]:
                grads[1] = torch.mm(rows.t(), _rows(x).float()).to(half)
            if ctx.needs_input_grad[2]:
                grads[2] = rows.sum(0).to(half)
        return tuple(grads)


class Product(torch.autograd.Function):
    """A·B of half matrices or batches of them, broadcast as ``torch.matmul`` does."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        """Accumulate in float32 and round once."""
        needs_left, needs_right = ctx.needs_input_grad
        ctx.save_for_backward(left if needs_right else None, right if needs_left else None)
        ctx.shapes = left.shape, right.shape
        with uncast():
            return torch.matmul(left.float(), right.float()).to(left.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """g·Bᵀ and Aᵀ·g, each rounded once."""
        left, right = ctx.saved_tensors
        grads: list[Tensor | None] = [None, None]
        with uncast():
            wide = gradient.float()
            if ctx.needs_input_grad[0]:
                grads[0] = _left(wide, right.float(), ctx.shapes[0]).to(gradient.dtype)
            if ctx.needs_input_grad[1]:
                grads[1] = _right(left.float(), wide, ctx.shapes[1]).to(gradient.dtype)
        return tuple(grads)


class AddProduct(torch.autograd.Function):
    """β·C + α·A·B by ``addmm``, ``baddbmm`` or ``addbmm`` (which sums over the batch)."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Callable[..., Tensor],
        added: Tensor,
        left: Tensor,
        right: Tensor,
        beta: float,
        alpha: float,
    ) -> Tensor:
        """Accumulate in float32 and round once."""
        _, _, needs_left, needs_right, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(left if needs_right else None, right if needs_left else None)
        ctx.shapes = added.shape, left.shape, right.shape
        ctx.factors = beta, alpha
        with uncast():
            wide = operator(added.float(), left.float(), right.float(), beta=beta, alpha=alpha)
            return wide.to(left.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """β·g, α·g·Bᵀ and α·Aᵀ·g, each rounded once."""
        left, right = ctx.saved_tensors
        beta, alpha = ctx.factors
        grads: list[Tensor | None] = [None] * 6
        with uncast():
            wide = gradient.float()
            if ctx.needs_input_grad[1]:
                grads[1] = (wide.sum_to_size(ctx.shapes[0]) * beta).to(gradient.dtype)
            if ctx.needs_input_grad[2]:
                grads[2] = (_left(wide, right.float(), ctx.shapes[1]) * alpha).to(gradient.dtype)
            if ctx.needs_input_grad[3]:
                grads[3] = (_right(left.float(), wide, ctx.shapes[2]) * alpha).to(gradient.dtype)
        return tuple(grads)


def linear(operands: Operands, _: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``torch.nn.functional.linear``."""
    if not are_plain(input, weight, bias) or weight.dim() != 2 or input.dim() == 0:
        return NotImplemented
    cast = operands.cast
    return apply(Linear, cast(input), cast(weight), operands.cast_optional(bias))


def matmul(operands: Operands, _: Any, input: Tensor, other: Tensor) -> Any:
    """``torch.matmul``, ``mm``, ``bmm``, ``@``: vectors become matrices of one row or column for the while."""
    if not are_plain(input, other) or input.dim() == 0 or other.dim() == 0:
        return NotImplemented
    left, right = operands.cast(input), operands.cast(other)
    row, column = left.dim() == 1, right.dim() == 1
    left = left.unsqueeze(0) if row else left
    right = right.unsqueeze(1) if column else right
    if right.dim() == 2 and left.dim() > 2:
        # One tall matrix: the gradient of the right side is then one product, not one a batch.
        product = apply(Product, _rows(left), right)
        product = product.view(left.shape[:-1] + product.shape[-1:])
    else:
        product = apply(Product, left, right)
    product = product.squeeze(-1) if column else product
    return product.squeeze(-2 + column) if row else product


def exact_matmul(operands: Operands, func: Any, input: Tensor, mat2: Tensor) -> Any:
    """``mm`` and ``bmm``: no broadcasting; what they refuse stays PyTorch's to refuse."""
    dims = {"mm": 2, "bmm": 3}[func.__name__]
    if not isinstance(mat2, Tensor) or input.dim() != dims or mat2.dim() != dims or input.shape[:-2] != mat2.shape[:-2]:
        return NotImplemented
    return matmul(operands, func, input, mat2)


def uncast_matmul(operands: Operands, func: Any, input: Tensor, other: Tensor) -> Any:
    """``mv`` and ``dot``, which PyTorch casts on no processor: only what is half already."""
    dims = {"mv": (2, 1), "dot": (1, 1)}[func.__name__]
    if (input.dim(), other.dim()) != dims or {input.dtype, other.dtype} != {operands.half}:
        return NotImplemented
    return matmul(operands, func, input, other)


_SUMS = {"addmm": (torch.addmm, 2), "baddbmm": (torch.baddbmm, 3), "addbmm": (torch.addbmm, 3)}


def add_product(
    operands: Operands,
    func: Any,
    input: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """``addmm``, ``baddbmm`` and ``addbmm``."""
    operator, dims = _SUMS[func.__name__]
    if not are_plain(input, left, right) or left.dim() != dims or right.dim() != dims:
        return NotImplemented
    cast = operands.cast
    return apply(AddProduct, operator, cast(input), cast(left), cast(right), beta, alpha)
