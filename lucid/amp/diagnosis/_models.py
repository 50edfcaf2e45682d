"""What a module is, seen from outside: its wrappers, its parameters' names and sizes, what it is spread over.

Knows PyTorch's wrappers for data parallelism and compilation. Refuses to run a module.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lucid.amp.diagnosis._taps import local_values

__all__ = [
    "half_parameters",
    "is_compiled",
    "largest_weights",
    "module_names",
    "names",
    "path_of_rank",
    "rank",
    "ranks",
    "read",
    "replay_refusal",
    "signature",
    "unwrapped",
    "zero_gradients",
]

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def is_compiled(model: nn.Module) -> bool:
    """Whether this is the wrapper that ``torch.compile`` puts around a module."""
    return type(model).__name__ == "OptimizedModule"


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The module and what it wraps, from the outside in."""
    yield model
    while True:
        if isinstance(model, _PARALLEL):
            model = model.module
        elif is_compiled(model):
            model = next(iter(model.children()))
        else:
            return
        yield model


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    return list(_wrappers(model))[-1]


def names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter by its id; where a submodule is compiled, without the wrapper's part."""
    hidden = [f"{name}." if name else "" for name, module in model.named_modules() if is_compiled(module)]
    return {id(parameter): _plain(name, hidden) for name, parameter in model.named_parameters()}


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """The name of each module, likewise."""
    hidden = [f"{name}." if name else "" for name, module in model.named_modules() if is_compiled(module)]
    return {module: _plain(name, hidden) for name, module in model.named_modules() if not is_compiled(module)}


def _plain(name: str, hidden: list[str]) -> str:
    """``name`` without the one part that follows each prefix, innermost first."""
    for prefix in reversed(hidden):
        if name.startswith(prefix):
            name = prefix + name[len(prefix) :].partition(".")[2]
    return name.removesuffix(".")


class Weight(NamedTuple):
    """The largest magnitude of a parameter, on its device."""

    name: str
    largest: Tensor


def largest_weights(model: nn.Module) -> list[Weight]:
    """The largest magnitude of each floating-point parameter that holds anything; nothing is read."""
    known = names(model)
    return [
        Weight(known[id(parameter)], _largest(parameter)) for parameter in model.parameters() if _has_values(parameter)
    ]


def read(weights: list[Weight]) -> dict[str, float]:
    """The largest magnitudes by name, those that are finite; one read a device."""
    devices: dict[torch.device, list[Weight]] = {}
    for weight in weights:
        devices.setdefault(weight.largest.device, []).append(weight)
    found: dict[str, float] = {}
    for some in devices.values():
        numbers = torch.stack([weight.largest for weight in some]).tolist()
        found |= {weight.name: number for weight, number in zip(some, numbers, strict=True) if math.isfinite(number)}
    return found


def _has_values(parameter: Tensor) -> bool:
    if torch.nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return False
    return parameter.is_floating_point() and local_values(parameter).numel() > 0


def _largest(parameter: Tensor) -> Tensor:
    return local_values(parameter).abs().amax().float()


def signature(model: nn.Module) -> str:
    """A short text that two processes have in common exactly if they hold models of the same names and class."""
    text = "\n".join([type(model).__name__, *names(model).values()])
    return f"{zlib.crc32(text.encode()):08x}"


def half_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters that are trained in float16."""
    known = names(model)
    return [known[id(one)] for one in model.parameters() if one.dtype is torch.float16 and one.requires_grad]


def replay_refusal(model: nn.Module) -> str | None:
    """Why a forward of this model must not be run again on one rank alone; None where it may."""
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "its parameters are spread over ranks (DTensor), which would all have to run it"
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "its parameters are spread over ranks (FSDP), which would all have to run it"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "what a TorchScript module changes in itself could not be put back"
    if ranks() > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm would wait for the other ranks"
    return None


def rank() -> int:
    """This process's rank; 0 where there is one process."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def ranks() -> int:
    """How many processes train together."""
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if several else 1


def path_of_rank(path: str | os.PathLike[str]) -> Path:
    """The path itself on rank 0; on another rank, one with the rank in its name."""
    path = Path(path)
    return path.with_suffix(f".rank{rank()}{path.suffix}") if rank() else path


def zero_gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    """For each parameter that has a gradient, its name and whether that is zero throughout; nothing is read."""
    known = names(model)
    return [
        (known[id(parameter)], ~local_values(parameter.grad).any())
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
