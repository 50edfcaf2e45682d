"""Layouts on device meshes: FSDP2, HSDP, tensor and sequence parallel, and both at once."""

import functools
from typing import Any

import torch
from drill import Layout, overflows
from network import OPTIMIZERS, Net, batch, loss_of, net, share
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lucid.amp import GradScaler


@functools.cache
def mesh(*shape: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    """One mesh of each shape in a process; the last names for fewer dimensions."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


@functools.cache
def lower_half() -> DeviceMesh:
    """A mesh over the first half of four ranks, made on all of them."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("half", "within"))["within"]


@functools.cache
def crooked() -> DeviceMesh:
    """A grid whose rows are neither sorted nor evenly spaced."""
    return DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("dp", "tp"))


def fsdp2(optimizer: str, **policies: Any) -> Layout:
    """Every parameter sharded over all ranks."""
    return _fsdp2(optimizer, mesh(2, names=("dp",)), **policies)


def fsdp2_half(optimizer: str) -> Layout:
    """Forward, backward and reduction in float16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    layout = fsdp2(optimizer, mp_policy=policy)
    layout.whole = None  # rounding differs from one process in float32
    return layout


def fsdp2_half_overflow(optimizer: str) -> Layout:
    """A loss of one rank is large enough for its float16 gradients to overflow; only some shards see it."""
    layout = fsdp2_half(optimizer)
    backward = layout.backward

    def grown(iteration: int, scaler: GradScaler) -> None:
        factor = 2.0**20 if overflows(iteration) else 1.0
        backward(iteration, _Louder(scaler, factor))

    layout.backward, layout.poison = grown, lambda _: None
    return layout


class _Louder:
    """A scaler whose losses are multiplied by a factor first."""

    def __init__(self, scaler: GradScaler, factor: float) -> None:
        self._scaler, self._factor = scaler, factor

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, too large."""
        return self._scaler.scale(loss * self._factor)


def fsdp2_offload(optimizer: str) -> Layout:
    """Shards and gradients kept in host memory."""
    return fsdp2(optimizer, offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_ignored(optimizer: str) -> Layout:
    """A plain, replicated parameter beside the sharded ones, its gradient averaged by hand."""
    model = net()
    grid = mesh(2, names=("dp",))
    fully_shard(model, mesh=grid, ignored_params={model.norm.weight, model.norm.bias})
    layout = _on(model, optimizer, grid)
    backward = layout.backward

    def averaged(iteration: int, scaler: GradScaler) -> None:
        backward(iteration, scaler)
        for parameter in model.norm.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2

    layout.backward = averaged
    layout.same = lambda: dict(model.norm.named_parameters())
    return layout


def hsdp(optimizer: str) -> Layout:
    """Sharded over pairs that are replicas of each other."""
    return _fsdp2(optimizer, mesh(2, 2, names=("replicate", "shard")))


def tensor_parallel(optimizer: str) -> Layout:
    """Columns, then rows; the norm is outside the plan and stays plain."""
    model = net()
    parallelize_module(model, mesh(2, names=("tp",)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _on(model, optimizer, same=model.norm)


def replicated_first(optimizer: str) -> Layout:
    """The first parameter of the optimizer is replicated over the mesh that shards the others."""
    model = net()
    grid = mesh(2, names=("tp",))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, grid, plan)
    distribute_module(model.norm, grid, input_fn=_enter, output_fn=_leave)
    return _on(model, optimizer, same=model.norm)


def sequence_parallel(optimizer: str) -> Layout:
    """The norm works on each rank's part of the sequence."""
    model = net()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    grid = mesh(2, names=("tp",))
    parallelize_module(model, grid, plan)
    to_parts = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
    to_whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(model, grid, to_parts)
    parallelize_module(model, grid, to_whole)
    return _on(model, optimizer, same=model.norm)


def sharded_and_parallel(optimizer: str) -> Layout:
    """FSDP2 over the rows of the mesh, tensor parallel over its columns, the norm only on the rows."""
    model = net()
    grid = mesh(2, 2)
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    return _on(model, optimizer, grid["dp"])


def _fsdp2(optimizer: str, grid: DeviceMesh, **policies: Any) -> Layout:
    model = net()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=grid, **policies)
    fully_shard(model, mesh=grid, **policies)
    return _on(model, optimizer, grid)


def _on(model: Net, optimizer: str, data: DeviceMesh | None = None, same: nn.Module | None = None) -> Layout:
    """The layout of a model whose batch is split over the mesh ``data``, or which sees whole batches."""
    parts = data.size() if data else 1
    part = _position(data) if data else 0

    def backward(iteration: int, scaler: GradScaler) -> None:
        x, y = share(iteration, part, parts) if data else batch(iteration)
        scaler.scale(loss_of(model(x), y)).backward()

    def whole() -> dict[str, Tensor]:
        return {name: _full(value).detach().clone() for name, value in model.named_parameters()}

    stepper = OPTIMIZERS[optimizer](model.parameters())
    return Layout(backward, stepper, whole=whole, same=lambda: dict(same.named_parameters()) if same else {})


def _position(grid: DeviceMesh) -> int:
    index = 0
    for dimension, coordinate in enumerate(grid.get_coordinate()):
        index = index * grid.size(dimension) + coordinate
    return index


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _enter(_: nn.Module, inputs: tuple[Tensor], grid: DeviceMesh) -> tuple[Tensor]:
    return (distribute_tensor(inputs[0], grid, [Replicate()]),)


def _leave(_: nn.Module, output: DTensor, grid: DeviceMesh) -> Tensor:
    return output.to_local()
