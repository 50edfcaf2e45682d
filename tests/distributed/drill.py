"""Six iterations on one rank, with an overflow on none, one, another one, all, none and none of the ranks.

Knows the scaler's loop and what every rank must report afterwards. Knows no layout: it is handed one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from team import named
from torch import Tensor

from lucid.amp import GradScaler

INTERVAL, SCALE = 2, 1024.0
ITERATIONS, OVERFLOW_ON_LAST, OVERFLOW_ON_FIRST, OVERFLOW_ON_ALL = 6, 1, 2, 3
# On paper: a good step; a skip for the last rank, for the first, for all; then two good steps and growth.
SKIPS = (False, True, True, True, False, False)
SCALES = (1024.0, 512.0, 256.0, 128.0, 128.0, 256.0)


@dataclasses.dataclass
class Layout:
    """A model spread over the ranks, as this rank sees it.

    Attributes:
        backward: given an iteration and the scaler, leaves scaled gradients behind.
        optimizer: whose step is decided.
        process_group: for the scaler.
        same: tensors that must be equal on every rank.
        whole: all parameters as one process would hold them; None where that is not defined.
        poison: puts an inf into this rank's gradients; given the iteration.
    """

    backward: Callable[[int, GradScaler], None]
    optimizer: torch.optim.Optimizer
    process_group: Any = None
    same: Callable[[], dict[str, Tensor]] = dict
    whole: Callable[[], dict[str, Tensor]] | None = None
    poison: Callable[[int], None] | None = None


@dataclasses.dataclass
class Report:
    """What one rank saw."""

    skips: list[bool]
    scales: list[float]
    same: list[dict[str, Tensor]]
    whole: dict[str, Tensor] | None


def local(tensor: Tensor) -> Tensor:
    """This rank's values."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def poison_gradient(optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """Put an inf into the first of this rank's gradients, or into the last one in odd iterations."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [local(p.grad) for p in parameters if p.grad is not None]
    values = [value for value in values if value.numel()]
    if values:
        value = values[-(iteration % 2)]
        with torch.no_grad():
            value[(0,) * value.ndim] = torch.inf


def overflows(iteration: int) -> bool:
    """Whether this rank's gradients overflow in this iteration."""
    size = dist.get_world_size()
    ranks = {OVERFLOW_ON_LAST: [size - 1], OVERFLOW_ON_FIRST: [0], OVERFLOW_ON_ALL: range(size)}
    return dist.get_rank() in ranks.get(iteration, ())


def drill(build: str, *arguments: Any) -> Report:
    """Run the iterations with the layout that ``build`` names and report."""
    layout = named(build)(*arguments)
    scaler = GradScaler(init_scale=SCALE, growth_interval=INTERVAL, process_group=layout.process_group)
    report = Report([], [], [], None)
    for iteration in range(ITERATIONS):
        layout.optimizer.zero_grad()
        layout.backward(iteration, scaler)
        if overflows(iteration):
            (layout.poison or (lambda i: poison_gradient(layout.optimizer, i)))(iteration)
        scaler.step(layout.optimizer)
        scaler.update()
        report.skips.append(scaler.step_was_skipped(layout.optimizer))
        report.scales.append(scaler.get_scale())
        report.same.append({name: local(value).detach().clone() for name, value in layout.same().items()})
    report.whole = layout.whole() if layout.whole else None
    return report
