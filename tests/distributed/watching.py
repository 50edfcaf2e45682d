"""Watched trainings on several ranks, run by every rank of a team.

Each returns what this rank's explanation says. Knows which rank's batch is at fault; knows nothing of what is
right to say.
"""

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lucid.amp import GradScaler
from lucid.amp.diagnosis import explain, watch

MAKERS = {"lucid": GradScaler, "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings)}


def network() -> nn.Sequential:
    """Two layers, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def steps(model: nn.Module, scaler: Any, bad_rank: int | None, how: str, count: int = 2) -> None:
    """Train; in the second step one rank's batch holds a NaN, or its loss is made huge."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    for number in range(count):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank + 10 * number))
        factor = 1.0
        if rank == bad_rank and number == 1:
            if how == "nan":
                x[0, 0] = torch.nan
            else:
                factor = 3e38
        optimizer.zero_grad()
        scaler.scale(model(x).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def told(scaler: Any) -> dict[str, Any]:
    """This rank's explanation as plain values."""
    explanation = explain(scaler)
    causes = [(cause.rank, cause.kind, cause.where) for cause in explanation.causes]
    return {"kind": explanation.kind, "where": explanation.where, "causes": causes, "text": str(explanation)}


def replicated(kind: str, bad_rank: int | None, how: str) -> dict[str, Any]:
    """DDP with a watch on every rank."""
    model = nn.parallel.DistributedDataParallel(network())
    scaler = MAKERS[kind](init_scale=1024.0)
    with watch(model, scaler, report=None):
        steps(model, scaler, bad_rank, how)
        dist.barrier()
        return told(scaler)


def watched_on_one(kind: str) -> dict[str, Any]:
    """DDP with a watch on rank 0 only: nobody hangs, and the second question is not waited for."""
    model = nn.parallel.DistributedDataParallel(network())
    scaler = MAKERS[kind](init_scale=1024.0)
    watching = watch(model, scaler, report=None) if dist.get_rank() == 0 else contextlib.nullcontext()
    with watching:
        steps(model, scaler, 1, "nan")
        if dist.get_rank():
            return {}
        first = told(scaler)
        began = time.monotonic()
        return {**first, "again": time.monotonic() - began, "second": told(scaler)["kind"]}


def reporting(kind: str) -> list[str]:
    """What this rank reported of one skip."""
    model = nn.parallel.DistributedDataParallel(network())
    scaler, reports = MAKERS[kind](init_scale=1024.0), []
    with watch(model, scaler, report=reports.append):
        steps(model, scaler, 1, "nan")
        dist.barrier()
    return [str(report) for report in reports]


def sharded() -> dict[str, Any]:
    """FSDP2: the parameters are spread, so that no forward is run again; the gradients are each rank's part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    scaler = GradScaler(init_scale=1024.0)
    with watch(model, scaler, report=None):
        steps(model, scaler, 1, "nan")
        dist.barrier()
        return told(scaler)


def sharded_by_pytorch() -> dict[str, Any]:
    """FSDP's ShardedGradScaler over plain parameters: an overflow on one rank skips on both."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model: Any = network()
    scaler: Any = ShardedGradScaler("cpu", init_scale=1024.0)
    before: list[Tensor] = [parameter.detach().clone() for parameter in model.parameters()]
    with watch(model, scaler, report=None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(torch.ones(2, 4)).mean() * (3e38 if dist.get_rank() else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        dist.barrier()
        moved = any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        return {**told(scaler), "moved": moved}
