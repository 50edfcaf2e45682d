"""PyTorch's private names, each with a public fallback.

Knows which underscore names of torch this package uses, and what does the same work without them, only
slower. Refuses to know scales, optimizers' stages and ranks. It is the one file that says such a name.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor


def _find(path: str) -> Any:
    """Return what torch has at a dotted path; None where it lacks the name or a part of the way to it."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


PRIVATE: dict[str, Any] = {
    path.rpartition(".")[2]: _find(path)
    for path in (
        "_amp_foreach_non_finite_check_and_unscale_",
        "_foreach_div_",
        "_foreach_mul_",
        "_foreach_norm",
        "_foreach_copy_",
        "_C._group_tensors_by_device_and_dtype",
        "_utils._flatten_dense_tensors",
    )
} | {"_step_supports_amp_scaling": "_step_supports_amp_scaling"}
"""What this torch has of the names used here; a name without a value takes its fallback."""

_OPTIMIZER_MODULE = importlib.import_module("torch.optim.optimizer")


def by_device_and_dtype(tensors: list[Tensor]) -> list[tuple[torch.device, torch.dtype, list[Tensor]]]:
    """Return the tensors in buckets of one device and one dtype each."""
    group = PRIVATE["_group_tensors_by_device_and_dtype"]
    if group is not None and tensors:
        return [(device, dtype, lists[0]) for (device, dtype), (lists, _) in group([tensors], False).items()]
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [(device, dtype, bucket) for (device, dtype), bucket in buckets.items()]


@functools.cache
def has_check_and_multiply(device_type: str, dtype: torch.dtype) -> bool:
    """Whether one batched operator checks and multiplies tensors of this dtype there; tried once each."""
    operator = PRIVATE["_amp_foreach_non_finite_check_and_unscale_"]
    if operator is None:
        return False
    found, factor = torch.zeros((), device=device_type), torch.full((), 0.5, device=device_type)
    try:
        operator([torch.ones(1, dtype=dtype, device=device_type)], found, factor)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def check_and_multiply_(tensors: list[Tensor], overflow: Tensor, factor: Tensor) -> None:
    """Multiply the tensors in place; ``overflow`` becomes 1 if an element was not finite *before* that.

    Args:
        tensors: of one device and dtype for which ``has_check_and_multiply`` holds.
        overflow: float32, zero-dimensional, on that device.
        factor: float32, zero-dimensional, on that device.
    """
    PRIVATE["_amp_foreach_non_finite_check_and_unscale_"](tensors, overflow, factor)


def divide_(tensors: list[Tensor], divisor: Tensor) -> None:
    """Divide tensors of one device and dtype in place by a zero-dimensional tensor of that dtype.

    The divisor is a tensor because CUDA turns a Python number into a reciprocal, which rounds twice.
    """
    if PRIVATE["_foreach_div_"] is not None:
        PRIVATE["_foreach_div_"](tensors, divisor)
    else:
        for tensor in tensors:
            tensor.div_(divisor)


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype in place by a zero-dimensional tensor."""
    if PRIVATE["_foreach_mul_"] is not None:
        PRIVATE["_foreach_mul_"](tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, converting the dtype."""
    if PRIVATE["_foreach_copy_"] is not None:
        PRIVATE["_foreach_copy_"](targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def joined(tensors: list[Tensor]) -> Tensor:
    """Return the elements of contiguous tensors of one device and dtype as one vector."""
    if all(tensor.dim() == 1 for tensor in tensors):
        return torch.cat(tensors)
    if PRIVATE["_flatten_dense_tensors"] is not None:
        vector: Tensor = PRIVATE["_flatten_dense_tensors"](tensors)
        return vector
    return torch.cat([tensor.view(-1) for tensor in tensors])


def norms(tensors: list[Tensor], order: float) -> Sequence[Tensor]:
    """Return each tensor's vector norm of that order, zero-dimensional, in the tensor's dtype."""
    if PRIVATE["_foreach_norm"] is not None:
        result: Sequence[Tensor] = PRIVATE["_foreach_norm"](tensors, order)
        return result
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


def has_step_pre_hooks(optimizer: object) -> bool:
    """Whether a hook would see the gradients before the optimizer's own arithmetic; True if unknown."""
    everywhere = getattr(_OPTIMIZER_MODULE, "_global_optimizer_pre_hooks", None)
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return everywhere is None or own is None or bool(everywhere) or bool(own)


def step_takes_factor(optimizer: object) -> bool:
    """Whether the optimizer says that its step divides by a ``grad_scale`` itself."""
    name = PRIVATE["_step_supports_amp_scaling"]
    return name is not None and bool(getattr(optimizer, name, False))


def step_is_stock(optimizer: object) -> bool:
    """Whether calling ``optimizer.step`` runs the step of a class of ``torch.optim`` and nothing else."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    own = getattr(optimizer, "__dict__", {}).get("step")
    # A learning rate scheduler wraps the step of its optimizer to count the calls.
    return own is None or getattr(own, "_wrapped_by_lr_sched", False)


def is_fsdp1_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a flat shard of FullyShardedDataParallel, or a view into one (``use_orig_params``).

    Without the private mark only the flat shard itself is known, by its class.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    return bool(getattr(parameter, "_fsdp_flattened", False)) or isinstance(parameter, fsdp.FlatParameter)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_traced(function: _Function) -> _Function:
    """Mark as ``torch.compiler.assume_constant_result`` does, but without importing the compiler for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def frame_skipper() -> Callable[[], object]:
    """What the compiler takes as the order to give a frame up and run it as it is; else what does nothing."""
    return _find("_dynamo.skip_frame") or torch.compiler.is_compiling
