"""Layouts of data parallelism over whole models: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP1."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from drill import Layout, overflows
from meshes import mesh
from network import OPTIMIZERS, loss_of, net, share
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lucid.amp import GradScaler

Backward = Callable[[int, GradScaler], None]


def my_share(iteration: int) -> tuple[Tensor, Tensor]:
    """This rank's rows."""
    return share(iteration, dist.get_rank(), dist.get_world_size())


def plain_backward(model: nn.Module, grows: bool = False) -> Backward:
    """Scaled backward of this rank's rows; with ``grows`` overflows begin in the loss, before any reduction."""

    def backward(iteration: int, scaler: GradScaler) -> None:
        x, y = my_share(iteration)
        loss = scaler.scale(loss_of(model(x), y))
        (loss * torch.inf if grows and overflows(iteration) else loss).backward()

    return backward


def accumulating_backward(model: DistributedDataParallel) -> Backward:
    """The rows one by one: all but the last under ``no_sync``; an overflowing rank's inf is in the first."""

    def backward(iteration: int, scaler: GradScaler) -> None:
        x, y = my_share(iteration)
        for row in range(len(x)):
            last = row == len(x) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = scaler.scale(loss_of(model(x[row : row + 1]), y[row : row + 1]) / len(x))
                (loss * torch.inf if overflows(iteration) and not row else loss).backward()

    return backward


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """By name."""
    return dict(model.named_parameters())


def ddp_before(optimizer: str, **options: Any) -> Layout:
    """The overflow happens before the all-reduce, which carries it to every rank: no group is needed."""
    model = DistributedDataParallel(net(), **options)
    return _replicated(model, optimizer, plain_backward(model, grows=True), poison=lambda _: None)


def ddp_static_graph(optimizer: str) -> Layout:
    """With ``static_graph``."""
    return ddp_before(optimizer, static_graph=True)


def ddp_bucket_view(optimizer: str) -> Layout:
    """Gradients are views of the communication buckets."""
    return ddp_before(optimizer, gradient_as_bucket_view=True)


def ddp_no_sync(optimizer: str) -> Layout:
    """Accumulation under ``no_sync``."""
    model = DistributedDataParallel(net())
    return _replicated(model, optimizer, accumulating_backward(model), poison=lambda _: None)


def ddp_after(optimizer: str) -> Layout:
    """The overflow happens on one rank after the all-reduce: only a group tells the others."""
    model = DistributedDataParallel(net())
    return _replicated(model, optimizer, plain_backward(model), process_group=dist.group.WORLD)


def zero(optimizer: str) -> Layout:
    """The optimizer's state is sharded, the gradients are replicated."""
    model = DistributedDataParallel(net())
    return _zero(model, optimizer, plain_backward(model, grows=True), poison=lambda _: None)


def zero_after(optimizer: str) -> Layout:
    """The same with the overflow after the all-reduce, and a group."""
    model = DistributedDataParallel(net())
    return _zero(model, optimizer, plain_backward(model), process_group=dist.group.WORLD)


def fsdp1(optimizer: str, use_orig_params: bool) -> Layout:
    """FullyShardedDataParallel: each rank's shard overflows alone; a group is required."""
    model = FullyShardedDataParallel(net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))

    def whole() -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: value.detach().clone() for name, value in model.module.named_parameters()}

    stepper = OPTIMIZERS[optimizer](model.parameters())
    return Layout(plain_backward(model), stepper, dist.group.WORLD, whole=whole)


def fsdp1_flat(optimizer: str) -> Layout:
    """The optimizer holds the flat shards."""
    return fsdp1(optimizer, use_orig_params=False)


def fsdp1_views(optimizer: str) -> Layout:
    """The optimizer holds views into them."""
    return fsdp1(optimizer, use_orig_params=True)


def fsdp1_hybrid(optimizer: str) -> Layout:
    """Shards over pairs that are replicas of each other."""
    hybrid = ShardingStrategy.HYBRID_SHARD
    options = {"sharding_strategy": hybrid, "device_mesh": mesh(2, 2), "use_orig_params": True}
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **options)
    return Layout(plain_backward(model), OPTIMIZERS[optimizer](model.parameters()), dist.group.WORLD)


def _replicated(model: nn.Module, optimizer: str, backward: Backward, **options: Any) -> Layout:
    stepper = OPTIMIZERS[optimizer](model.parameters())

    def same() -> dict[str, Tensor]:
        return parameters_of(model.module)

    def whole() -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in same().items()}

    return Layout(backward, stepper, same=same, whole=whole, **options)


def _zero(model: nn.Module, optimizer: str, backward: Backward, **options: Any) -> Layout:
    layout = _replicated(model, optimizer, backward, **options)
    kind = type(layout.optimizer)
    layout.optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **layout.optimizer.defaults)
    return layout
