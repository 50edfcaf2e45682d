"""Convolutions and transposed convolutions in one, two and three dimensions.

Knows PyTorch's one operator for all of them and that for its gradients. Refuses to know products of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lucid.amp._half._operands import Operands, are_plain
from lucid.amp._half._wide import apply, uncast

Sizes = int | Sequence[int]


class Convolution(torch.autograd.Function):
    """A convolution of half operands: input (N, C, ...), weight, bias (out) or None.

    ``settings`` are those of ``torch.convolution``: stride, padding, dilation, transposed, output padding,
    groups.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        """Accumulate in float32 and round once."""
        ctx.save_for_backward(input, weight)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.settings = settings
        with uncast():
            wide = torch.convolution(input.float(), weight.float(), None if bias is None else bias.float(), *settings)
            return wide.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """PyTorch's gradients of the float32 convolution, each rounded once."""
        input, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        with uncast():
            wide = torch.ops.aten.convolution_backward(
                gradient.float(), input.float(), weight.float(), ctx.bias_sizes, *ctx.settings, needed
            )
            rounded = (w.to(gradient.dtype) if need else None for w, need in zip(wide, needed, strict=True))
            return (*rounded, *(None for _ in ctx.settings))


def _each(value: Sizes, dims: int) -> list[int]:
    """A size for each dimension, from one for all or a sequence of one or all."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * dims if len(sizes) == 1 else sizes


def _padding(padding: Sizes | str, weight: Tensor, dilation: list[int]) -> tuple[list[int], list[int]]:
    """The zeros before and after each dimension."""
    dims = len(dilation)
    if not isinstance(padding, str):
        return (_each(padding, dims),) * 2
    if padding == "valid":
        return ([0] * dims,) * 2
    total = [d * (kernel - 1) for d, kernel in zip(dilation, weight.shape[2:], strict=True)]
    return [size // 2 for size in total], [size - size // 2 for size in total]


def _convolve(operands: Operands, dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    """Cast and convolve; an input without a batch gets one for the while."""
    cast = operands.cast
    batched = input.dim() == dims + 2
    half = cast(input) if batched else cast(input).unsqueeze(0)
    output = apply(Convolution, half, cast(weight), operands.cast_optional(bias), *settings)
    return output if batched else output.squeeze(0)


def _dims(func: Any) -> int:
    return int(func.__name__[-2])


def _fits(dims: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if not are_plain(input, weight, bias):
        return False
    return weight.dim() == dims + 2 and input.dim() in (dims + 1, dims + 2)


def convolution(
    operands: Operands,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """``conv1d``, ``conv2d`` and ``conv3d``."""
    dims = _dims(func)
    if not _fits(dims, input, weight, bias):
        return NotImplemented
    strides, dilations = _each(stride, dims), _each(dilation, dims)
    if isinstance(padding, str) and (padding not in ("same", "valid") or (padding == "same" and set(strides) != {1})):
        return NotImplemented
    before, after = _padding(padding, weight, dilations)
    if before != after:
        # Only a padded copy of the input has more zeros on one side.
        uneven = [size for pair in zip(before[::-1], after[::-1], strict=True) for size in pair]
        input, before = functional.pad(input, uneven), [0] * dims
    settings = (strides, before, dilations, False, [0] * dims, groups)
    return _convolve(operands, dims, input, weight, bias, *settings)


def transposed_convolution(
    operands: Operands,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Any:
    """``conv_transpose1d``, ``conv_transpose2d`` and ``conv_transpose3d``."""
    dims = _dims(func)
    if not _fits(dims, input, weight, bias):
        return NotImplemented
    sizes = (_each(size, dims) for size in (stride, padding, dilation))
    return _convolve(operands, dims, input, weight, bias, *sizes, True, _each(output_padding, dims), groups)
