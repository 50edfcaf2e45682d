"""PyTorch's private names, each with a public fallback.

Knows which underscore names of torch this package uses, and what does the same work without them, only
slower. Refuses to know scales, optimizers' stages and ranks. It is the one file that says such a name.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

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
        "_C._set_grad_enabled",
        "_C._are_functorch_transforms_active",
        "_C._autograd._top_saved_tensors_default_hooks",
        "_utils._flatten_dense_tensors",
    )
} | {name: name for name in ("_step_supports_amp_scaling", "_fsdp_flattened")}
"""What this torch has of the names used here; a name without a value takes its fallback."""

TAKES_FACTOR: str = PRIVATE["_step_supports_amp_scaling"] or ""
"""The attribute by which an optimizer says that its step divides by a ``grad_scale`` itself."""

_C10D = _find("distributed.distributed_c10d")
_OPTIMIZER_MODULE = importlib.import_module("torch.optim.optimizer")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_grad(function: _Function) -> _Function:
    """Run a function as ``torch.no_grad`` does, at a small part of its cost."""
    switch, is_on = PRIVATE["_set_grad_enabled"] or torch.set_grad_enabled, torch.is_grad_enabled

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        """Call it with gradients off, and put back what was."""
        before = is_on()
        switch(False)
        try:
            return function(*args, **kwargs)
        finally:
            switch(before)

    return wrapper  # type: ignore[return-value]


Bucket: TypeAlias = tuple[torch.device, torch.dtype, list[Tensor]]
"""Tensors of one device and one dtype, in the order in which they were given."""

_IS_CPU = operator.attrgetter("is_cpu")
_DTYPE = operator.attrgetter("dtype")


def by_device_and_dtype(tensors: list[Tensor]) -> list[Bucket]:
    """Return the tensors in buckets, the first tensor's bucket first; there is none without a tensor."""
    if tensors and all(map(_IS_CPU, tensors)):
        dtypes = set(map(_DTYPE, tensors))
        if len(dtypes) == 1:
            return [(tensors[0].device, dtypes.pop(), tensors)]
    group = PRIVATE["_group_tensors_by_device_and_dtype"]
    if group is not None and tensors:
        found = [(device, dtype, lists[0]) for (device, dtype), (lists, _) in group([tensors], False).items()]
        return sorted(found, key=lambda bucket: bucket[2][0] is not tensors[0])
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [(device, dtype, bucket) for (device, dtype), bucket in buckets.items()]


CheckAndMultiply: TypeAlias = Callable[[list[Tensor], Tensor, Tensor], None]
"""Multiplies tensors in place by a factor; a flag becomes 1 if an element was not finite *before* that.

The flag and the factor are float32, zero-dimensional, and on the tensors' device.
"""


@functools.cache
def check_and_multiply(device: torch.device, dtype: torch.dtype) -> CheckAndMultiply | None:
    """Return the operator that does it exactly to a list of tensors of this dtype there, if any; tried once each."""
    batched: CheckAndMultiply | None = PRIVATE["_amp_foreach_non_finite_check_and_unscale_"]
    # CUDA's looks at a float64 through a float32: it takes 1e39, which is finite, for an overflow.
    if batched is None or (dtype is torch.float64 and device.type != "cpu"):
        return None
    for made in (batched, without_grad(batched)):
        if _divides_leaves(made, device, dtype):
            return made
    return None


def _divides_leaves(check_and_multiply_: CheckAndMultiply, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it takes tensors of this dtype there, with autograd at work.

    It is tried on a leaf that requires a gradient, which no operator may change that autograd notes.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # Every dtype is said: a user's default dtype may be another.
        found = torch.zeros((), dtype=torch.float32, device=device)
        factor = torch.full((), 0.5, dtype=torch.float32, device=device)
        leaf = torch.ones(1, dtype=dtype, device=device, requires_grad=True)
        try:
            check_and_multiply_([leaf], found, factor)
        except torch.OutOfMemoryError:  # says nothing, and is asked again
            raise
        except (NotImplementedError, RuntimeError):
            return False
    return True


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


def copies(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of tensors of one device and dtype in another dtype."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    copy_(made, tensors)
    return made


def joined(tensors: list[Tensor]) -> Tensor:
    """Return the elements of tensors of one device and dtype as one vector, each tensor's in any order."""
    if set(map(Tensor.dim, tensors)) == {1}:
        return torch.cat(tensors)
    if not tensors[0].is_cpu:  # there a copy is a launch, which costs more than to find out how a tensor lies
        tensors = [tensor if tensor.is_contiguous() else _as_it_lies(tensor) for tensor in tensors]
    if PRIVATE["_flatten_dense_tensors"] is not None:
        vector: Tensor = PRIVATE["_flatten_dense_tensors"](tensors)
        return vector
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _as_it_lies(tensor: Tensor) -> Tensor:
    """The elements as a vector: a view, without a launch, of whatever fills its memory, channels_last too."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)


def norms(tensors: list[Tensor], order: float, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Return each tensor's vector norm of that order, zero-dimensional; in a wider dtype, if one is given."""
    if PRIVATE["_foreach_norm"] is not None:
        result: Sequence[Tensor] = PRIVATE["_foreach_norm"](tensors, order, dtype)
        return result
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def has_step_pre_hooks(optimizer: object) -> bool:
    """Whether a hook would see the gradients before the optimizer's own arithmetic; True if unknown."""
    everywhere = getattr(_OPTIMIZER_MODULE, "_global_optimizer_pre_hooks", None)
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return everywhere is None or own is None or bool(everywhere) or bool(own)


def step_is_stock(optimizer: Any) -> bool:
    """Whether calling ``optimizer.step`` runs the step of a class of ``torch.optim`` and nothing else.

    The wrappers that PyTorch puts around it (for hooks, or a learning rate scheduler's count) are looked through.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    step = getattr(optimizer, "__dict__", {}).get("step", type(optimizer).step)
    while step is not None:
        # functools.wraps copies the module's name, but not the globals.
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def is_fsdp1_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a flat shard of FullyShardedDataParallel, or a view into one (``use_orig_params``).

    Without the private mark only the flat shard itself is known, by its class.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    mark = PRIVATE["_fsdp_flattened"]
    return isinstance(parameter, fsdp.FlatParameter) or (mark is not None and hasattr(parameter, mark))


def constant_when_traced(function: _Function) -> _Function:
    """Mark as ``torch.compiler.assume_constant_result`` does, but without importing the compiler for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def frame_skipper() -> Callable[[], object]:
    """What the compiler takes as the order to give a frame up and run it as it is; else what does nothing."""
    return _find("_dynamo.skip_frame") or torch.compiler.is_compiling


def version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where that is not told."""
    return None if tensor.is_inference() else getattr(tensor, "_version", None)


def function_transforms_are_active() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work; without private names, ``torch.func``."""
    active = PRIVATE["_are_functorch_transforms_active"]
    if active is not None:
        return active() or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch._functorch."):
        frame = frame.f_back
    return frame is not None


def checkpoint() -> object:
    """What stands for the innermost ``torch.utils.checkpoint`` now at work in this thread, or ``None``.

    It is the hook that will see the next tensor saved for backward, if a checkpoint's; without the private
    name, the innermost call into that module.
    """
    top = PRIVATE["_top_saved_tensors_default_hooks"]
    if top is not None:
        hooks = top(True)
        return hooks[0] if hooks and hooks[0].__module__ == _CHECKPOINT else None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_in_checkpoint(frame):
        frame = frame.f_back
    # It enters its contexts one call deeper than it runs the function.
    while frame is not None and _is_in_checkpoint(frame.f_back):
        frame = frame.f_back
    return frame


_CHECKPOINT = "torch.utils.checkpoint"


def _is_in_checkpoint(frame: types.FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__") == _CHECKPOINT


def is_distributed() -> bool:
    """Whether ``torch.distributed`` is initialized; False where this torch was built without it."""
    try:
        # Where it is kept: is_initialized looks there, too, by a way that takes many times as long.
        return _C10D._world._default_pg is not None
    except AttributeError:
        return torch.distributed.is_available() and torch.distributed.is_initialized()


def common_store() -> Any | None:
    """The key-value store through which this job's processes found each other; None where there is none."""
    if not is_distributed():
        return None
    find = _find("distributed.distributed_c10d._get_default_store")
    return find() if find is not None else None
