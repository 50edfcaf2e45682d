"""Layouts that no tensor tells of: pipeline stages, expert shards, optimizers of some ranks only."""

import functools

import torch
import torch.distributed as dist
from drill import OVERFLOW_ON_ALL, OVERFLOW_ON_LAST, SKIPS, Layout
from network import HIDDEN, OPTIMIZERS, batch, loss_of, net
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from lucid.amp import GradScaler

CHUNKS = 2


def pipeline(optimizer: str) -> Layout:
    """Two stages of torch.distributed.pipelining; the scale enters through the schedule's loss function."""
    rank, model = dist.get_rank(), net()
    stages = [nn.Sequential(model.norm, model.up, nn.ReLU()), model.down]
    stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
    scalers: list[GradScaler] = []
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=lambda out, y: scalers[-1].scale(loss_of(out, y)))

    def backward(iteration: int, scaler: GradScaler) -> None:
        scalers.append(scaler)
        x, y = batch(iteration)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)

    names = {id(value): name for name, value in model.named_parameters()}

    def whole() -> dict[str, Tensor]:
        mine = {names[id(value)]: value.detach().clone() for value in stages[rank].parameters()}
        return _collected(mine)

    return Layout(backward, OPTIMIZERS[optimizer](stages[rank].parameters()), dist.group.WORLD, whole=whole)


def experts(optimizer: str) -> Layout:
    """The hidden units cut in two by hand, one half a rank, in plain tensors; the norm is replicated."""
    rank, model = dist.get_rank(), net()
    half = slice(rank * HIDDEN // 2, (rank + 1) * HIDDEN // 2)
    up = nn.Parameter(model.up.weight.detach()[half].clone())
    up_bias = nn.Parameter(model.up.bias.detach()[half].clone())
    down = nn.Parameter(model.down.weight.detach()[:, half].clone())
    shards = {"up.weight": (up, 0), "up.bias": (up_bias, 0), "down.weight": (down, 1)}
    copies = {"norm.weight": model.norm.weight, "norm.bias": model.norm.bias, "down.bias": model.down.bias}

    def backward(iteration: int, scaler: GradScaler) -> None:
        x, y = batch(iteration)
        hidden = torch.relu(nn.functional.linear(model.norm(x), up, up_bias))
        part = nn.functional.linear(hidden, down)
        others = part.detach().clone()
        dist.all_reduce(others)
        out = part + (others - part.detach()) + model.down.bias
        scaler.scale(loss_of(out, y)).backward()
        for parameter in model.norm.parameters():
            dist.all_reduce(parameter.grad)

    def whole() -> dict[str, Tensor]:
        parts = [None, None]
        dist.all_gather_object(parts, {name: value.detach() for name, (value, _) in shards.items()})
        joined = {name: torch.cat([part[name] for part in parts], dim) for name, (_, dim) in shards.items()}
        return joined | {name: value.detach().clone() for name, value in copies.items()}

    parameters = [*copies.values(), up, up_bias, down]
    return Layout(backward, OPTIMIZERS[optimizer](parameters), dist.group.WORLD, lambda: copies, whole)


def without_gradients(optimizer: str) -> Layout:
    """Where one rank overflows the other has no gradient at all; elsewhere the last has none."""
    rank, model = dist.get_rank(), net()

    def backward(iteration: int, scaler: GradScaler) -> None:
        x, y = batch(iteration)
        if iteration == OVERFLOW_ON_ALL or rank == int(iteration == OVERFLOW_ON_LAST):
            scaler.scale(loss_of(model(x), y)).backward()

    return Layout(backward, OPTIMIZERS[optimizer](model.parameters()), dist.group.WORLD)


def without_parameters(optimizer: str) -> Layout:
    """The last rank's optimizer has no parameter at all; the first overflows instead of it."""
    rank, model = dist.get_rank(), net()

    def backward(iteration: int, scaler: GradScaler) -> None:
        if rank == 0:
            x, y = batch(iteration)
            loss = scaler.scale(loss_of(model(x), y))
            (loss * torch.inf if SKIPS[iteration] else loss).backward()

    parameters = model.parameters() if rank == 0 else [{"params": []}]
    return Layout(backward, OPTIMIZERS[optimizer](parameters), dist.group.WORLD, poison=lambda _: None)


@functools.cache
def first_half() -> dist.ProcessGroup:
    """The lower half of the ranks."""
    return dist.new_group(range(dist.get_world_size() // 2))


def _collected(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return functools.reduce(lambda left, right: left | right, parts)
