"""Which process groups an optimizer's decision belongs to, and in which order they are asked.

Knows torch.distributed's groups and meshes, and which parameters live on them. Refuses to know what is
exchanged: no collective is started here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist

from lucid.amp._torch import is_distributed, is_fsdp1_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = dist.ProcessGroup
    Spread: TypeAlias = Group | DeviceMesh | Sequence["Group | DeviceMesh"]

_MEMBERS: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
"""The ranks of each mesh that was met: many parameters ask for those of one."""

_ACCEPTED = "a ProcessGroup, a DeviceMesh, a sequence of them, or {optimizer: one of these}"


def running() -> bool:
    """Whether there are other processes to agree with."""
    return is_distributed() and dist.get_world_size() > 1


def flatten(spread: Spread) -> tuple[Group, ...]:
    """The process groups that a user's ``process_group`` stands for, in the user's order.

    A mesh stands for the groups of its dimensions. What ``torch.distributed.new_group`` returns on a process
    outside the group stands for none.

    Raises:
        TypeError: for anything that is neither a group nor a mesh.
    """
    if isinstance(spread, Sequence) and not isinstance(spread, str):
        return tuple(group for part in spread for group in flatten(part))
    if _is_mesh(spread):
        return tuple(group for _, group in _dimensions(cast("DeviceMesh", spread)))
    if dist.is_available() and isinstance(spread, dist.ProcessGroup):
        return (spread,)
    if dist.is_available() and spread == dist.GroupMember.NON_GROUP_MEMBER:
        return ()
    raise TypeError(f"process_group must be {_ACCEPTED}; got {type(spread).__name__}")


def of_parameters(optimizer: Any) -> tuple[Group, ...]:
    """The groups of every mesh dimension that the optimizer's parameters live on, dimension by dimension.

    The order is a function of the groups alone, so that two ranks which share several of them take them in
    the same order whatever else each rank holds. First by description (PyTorch names it after the mesh
    dimension), then by the dimension's index and by the stride between ranks: in a grid the same everywhere.
    """
    found = [pair for mesh in _meshes(optimizer) for pair in _dimensions(mesh)]
    return tuple(group for _, group in sorted(found, key=_order))


def without_nested(groups: Iterable[Group]) -> tuple[Group, ...]:
    """The groups of more than one process, without those whose processes all stand in another of them."""
    members = {group: frozenset(ranks(group)) for group in groups}
    kept: list[frozenset[int]] = []
    for those in sorted(members.values(), key=len, reverse=True):
        if len(those) > 1 and not any(those <= other for other in kept):
            kept.append(those)
    first = {those: group for group, those in reversed(members.items())}
    return tuple(group for group, those in members.items() if those in kept and first[those] is group)


def refuse_flat_shards(optimizer: Any) -> None:
    """Refuse FSDP1's flat shards, which do not tell who holds the rest of them.

    Raises:
        RuntimeError: naming the parameter and the argument to add.
    """
    for g, group in enumerate(getattr(optimizer, "param_groups", ())):
        for i, parameter in enumerate(group["params"]):
            if is_fsdp1_shard(parameter):
                raise RuntimeError(_flat_shard_message(f"group {g}, parameter {i}", parameter))


def device_for(group: Group, near: Iterable[torch.Tensor]) -> torch.device:
    """A device on which this group's backend reduces: the host if it can, else that of the tensors ``near``."""
    config = dist.get_backend_config(group)
    kinds = [part.partition(":")[0] for part in config.split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return next((tensor.device for tensor in near if tensor.device.type in kinds), torch.device(kinds[0]))


def ranks(group: Group) -> list[int]:
    """The global ranks of a group.

    Raises:
        RuntimeError: where it was destroyed.
    """
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise RuntimeError(
            "a process group of this GradScaler was destroyed. Make a new GradScaler with "
            "process_group= the group that there is now, and load this one's state_dict() into it."
        ) from None


def members(tensor: Any) -> frozenset[int]:
    """The ranks among which a tensor says how it is spread: those of its mesh, or this one for a plain tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return frozenset([dist.get_rank()])
    if mesh not in _MEMBERS:
        _MEMBERS[mesh] = frozenset(mesh.mesh.flatten().tolist())
    return _MEMBERS[mesh]


def is_partial(tensor: Any) -> bool:
    """Whether a tensor is a DTensor whose local values are addends."""
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def is_first_replica(tensor: Any) -> bool:
    """Whether this rank is the first of those that the tensor's own mesh gives the same values."""
    placements = getattr(tensor, "placements", ())
    coordinates = tensor.device_mesh.get_coordinate() or () if placements else ()
    spread = zip(placements, coordinates, strict=False)
    return not any(index and (place.is_replicate() or place.is_partial()) for place, index in spread)


def local(tensor: Any) -> torch.Tensor:
    """This rank's values."""
    values: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return values


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters of an optimizer, in its order; none of what is no optimizer, which its callers refuse."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _is_mesh(spread: object) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(spread, module.DeviceMesh)


def _meshes(optimizer: Any) -> list[DeviceMesh]:
    # Whoever holds a DTensor has imported the module; who does not should not pay for the import.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return []
    meshes: dict[int, DeviceMesh] = {}
    for parameter in parameters_of(optimizer):
        if isinstance(parameter, module.DTensor):
            meshes[id(parameter.device_mesh)] = parameter.device_mesh
    return list(meshes.values())


def _dimensions(mesh: DeviceMesh) -> list[tuple[int, Group]]:
    if mesh.get_coordinate() is None:
        return []
    return [(i, mesh.get_group(i)) for i in range(mesh.ndim) if mesh.size(i) > 1]


def _order(dimension: tuple[int, Group]) -> tuple[Any, ...]:
    index, group = dimension
    those = sorted(ranks(group))
    return group.group_desc, index, [rank - those[0] for rank in those], those, group.group_name


def _flat_shard_message(place: str, parameter: torch.Tensor) -> str:
    return (
        f"this optimizer holds a flat shard of FullyShardedDataParallel ({place}, shape "
        f"{tuple(parameter.shape)}); it does not tell which processes hold the rest, so this one cannot decide "
        "alone whether to step. Say which processes share it: "
        "GradScaler(process_group=torch.distributed.group.WORLD)"
    )
