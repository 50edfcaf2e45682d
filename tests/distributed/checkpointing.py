"""Saving and loading a run with torch.distributed.checkpoint, on as many ranks as the team has."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from network import OPTIMIZERS, loss_of, net, share
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lucid.amp import GradScaler

EARLY, LATE = range(4), range(4, 7)
OVERFLOWS = 1  # the iteration whose gradients overflow on the last rank


class Run:
    """A model, its optimizer and its scaler as one ``Stateful``."""

    def __init__(self) -> None:
        self.model = fully_shard(net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = OPTIMIZERS["adam"](self.model.parameters())
        self.scaler = GradScaler(init_scale=1024.0, growth_interval=2, process_group=dist.group.WORLD)

    def state_dict(self) -> dict[str, Any]:
        """All three."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """All three."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.scaler.load_state_dict(state_dict["scaler"])

    def train(self, iterations: range) -> None:
        """Some iterations."""
        for iteration in iterations:
            self.optimizer.zero_grad()
            x, y = share(iteration, dist.get_rank(), dist.get_world_size())
            self.scaler.scale(loss_of(self.model(x), y)).backward()
            if iteration == OVERFLOWS and dist.get_rank() == dist.get_world_size() - 1:
                self.model.up.weight.grad.to_local()[0, 0] = torch.inf
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def result(self) -> tuple[list[float], dict[str, Tensor]]:
        """Scale and count, and all parameters."""
        state = self.scaler.state_dict()
        names = self.model.named_parameters()
        return [state["scale"], state["_growth_tracker"]], {n: _whole(p).detach().clone() for n, p in names}


def save(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train, save, and go on: what an uninterrupted run gives."""
    run = Run()
    run.train(EARLY)
    dcp.save({"run": run, "scaler alone": run.scaler}, checkpoint_id=folder)
    run.train(LATE)
    return run.result()


def load(folder: str) -> tuple[list[float], dict[str, Tensor], float]:
    """Load and go on; also the scale of a scaler that was loaded by itself."""
    run, scaler = Run(), GradScaler()
    dcp.load({"run": run, "scaler alone": scaler}, checkpoint_id=folder)
    run.train(LATE)
    return *run.result(), scaler.get_scale()


def collect_optimizer_state() -> list[Any]:
    """Scale, count, last update and answers before and after optimizer state was collected, at each stage."""
    run = Run()
    seen = []

    def note() -> None:
        state = run.scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"], run.scaler.last_update))
        get_optimizer_state_dict(run.model, run.optimizer)
        state = run.scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"], run.scaler.last_update))

    note()
    x, y = share(0, dist.get_rank(), dist.get_world_size())
    run.scaler.scale(loss_of(run.model(x), y)).backward()
    note()
    run.scaler.unscale_(run.optimizer)
    note()
    run.scaler.step(run.optimizer)
    note()
    run.scaler.update()
    note()
    return seen


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
