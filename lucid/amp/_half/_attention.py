"""Scaled dot-product attention.

Knows that PyTorch's operator is run once more to differentiate it, and that with dropout the mask must be the
same both times. Refuses to know the projections around it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lucid.amp._half._operands import Operands, are_plain
from lucid.amp._half._wide import Replay, apply, uncast


def attention(
    operands: Operands,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention``."""
    if not _fits(query, key, value, attn_mask) or (attn_mask is not None and is_causal):
        return NotImplemented
    tensors = [operands.cast(tensor) for tensor in (query, key, value)]
    if attn_mask is not None:
        tensors.append(attn_mask if attn_mask.dtype is torch.bool else operands.cast(attn_mask))
    if dropout_p > 0.0:
        tensors.append(_kept(query, key, dropout_p))
        call = functools.partial(_with_dropout, dropout_p, is_causal, scale)
    else:
        call = functools.partial(_attend, func, is_causal, scale, enable_gqa)
    return apply(Replay, call, operands.half, None, *tensors)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if not are_plain(query, key, value) or min(query.dim(), key.dim(), value.dim()) < 2:
        return False
    return mask is None or are_plain(mask) or (type(mask) is Tensor and mask.dtype is torch.bool)


def _attend(func: Any, is_causal: bool, scale: float | None, enable_gqa: bool, wide: Sequence[Tensor]) -> Any:
    keywords: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    if enable_gqa:  # which an older PyTorch does not know
        keywords["enable_gqa"] = True
    query, key, value, *mask = wide
    return func(query, key, value, mask[0] if mask else None, **keywords)


def _kept(query: Tensor, key: Tensor, dropout_p: float) -> Tensor:
    """Which weights dropout keeps, drawn as PyTorch draws them for the same generator state."""
    shape = (*query.shape[:-1], key.shape[-2])
    with uncast():
        return functional.dropout(torch.ones(shape), dropout_p).to(torch.bool)


def _with_dropout(dropout_p: float, is_causal: bool, scale: float | None, wide: Sequence[Tensor]) -> Tensor:
    """Attention spelled out, because the operator would draw another mask each time it is run."""
    query, key, value, *mask, kept = wide
    if query.dim() > 2 and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * factor
    if is_causal:
        mask = [torch.ones(scores.shape[-2:], dtype=torch.bool).tril()]
    for hidden in mask:
        scores = scores + hidden if hidden.is_floating_point() else scores.masked_fill(~hidden, -math.inf)
    weights = torch.softmax(scores, -1) * kept * (1 / (1 - dropout_p) if dropout_p < 1 else 0)
    return torch.matmul(weights, value)
