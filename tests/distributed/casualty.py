"""A program in which the last rank is killed, or stopped, between backward and step."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lucid.amp import GradScaler


def lose_a_rank(fault: signal.Signals) -> dict[str, Any]:
    """What the surviving rank's step raised, what it left, and how the same scaler goes on alone."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=4.0, growth_interval=1, process_group=dist.group.WORLD)
    scaler.scale((parameter * 16.0).sum()).backward()
    parameter.grad.fill_(64.0)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), fault)
    try:
        scaler.step(optimizer)
        error = ""
    except Exception as raised:
        error = type(raised).__name__
    seen = {"error": error, "gradient": parameter.grad.tolist(), "parameter": parameter.tolist()}
    state = scaler.state_dict()["scale"]
    dist.destroy_process_group()
    scaler.step(optimizer)
    scaler.update()
    alone = {"parameter": parameter.tolist(), "scale": scaler.get_scale(), "state": state}
    return seen | {"alone": alone}
