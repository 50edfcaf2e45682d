"""A few numbers that go round groups of processes and come back in one host read.

Knows collectives and devices. Refuses to know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lucid.amp import _meshes
from lucid.amp._unread import Unread

if TYPE_CHECKING:
    from lucid.amp._meshes import Group


def message(
    groups: Sequence[Group], near: Iterable[Tensor], numbers: list[int], unread: Unread | None = None
) -> Tensor:
    """Numbers of 32 bits on the device on which the first group is asked."""
    made = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    if unread is not None:
        # Completed where the unread is: if the group is asked on the host, it waits for this one copy.
        made = made.to(unread.device, non_blocking=True)
        unread.write(made)
    return _moved(made, groups[0], near) if groups else made


def _moved(message: Tensor, group: Group, near: Iterable[Tensor]) -> Tensor:
    # From the host it is not waited for: the numbers are copied before the call returns.
    return message.to(_meshes.device_for(group, near), non_blocking=message.is_cpu)


def reduce(groups: Sequence[Group], near: Iterable[Tensor], message: Tensor) -> list[int]:
    """The elementwise maximum over all ranks of the groups, in one host read."""
    for group in groups:
        message = _moved(message, group, near)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in message.tolist()]


def gather(
    groups: Sequence[Group], near: Iterable[Tensor], message: Tensor, as_one: Callable[[Tensor], Tensor]
) -> list[list[int]]:
    """The messages of the last group, each of which stands for its rank's earlier groups; in one host read.

    ``as_one`` makes one message of the rows that a group's ranks have told, on their device.
    """
    rows = message[None]
    for group in groups:
        message = _moved(as_one(rows) if len(rows) > 1 else rows[0], group, near)
        heard = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
        dist.all_gather(heard, message, group=group)
        rows = torch.stack(heard)
    told: list[list[int]] = rows.tolist()
    return told
