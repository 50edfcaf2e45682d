"""Did any rank overflow, and do all ranks hold the same scale?

The only file that talks to other processes. Knows collectives: what is asked, of which groups, what the
answer means. Refuses to know gradients: it is told this rank's verdict, or this rank's reason to refuse, and
returns everybody's.

Every question is one MAX reduction of a few numbers over each group in turn. In a grid of ranks the maximum
over the rows, then over the columns, is the maximum over all: no rank needs a group that spans them all.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2s
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lucid.amp import _meshes

if TYPE_CHECKING:
    from lucid.amp._meshes import Group, Spread

# What a refusal may be, the narrower class first. The other ranks raise the class that the refusing rank raises:
# a program that catches it then goes the same way everywhere.
_REFUSALS: tuple[type[Exception], ...] = (NotImplementedError, ValueError, TypeError, RuntimeError)
_MESSAGE_BYTES = 1024
_STEP, _UPDATE = 1, -1


class Consensus:
    """What the processes that share a model decide together.

    Args:
        process_group: the processes that decide together, where the parameters cannot tell: a ProcessGroup, a
            DeviceMesh, a sequence of them, or a mapping from optimizers to these. None: what DTensors tell.

    Raises:
        TypeError: for anything else.
    """

    def __init__(self, process_group: Spread | Mapping[Any, Spread] | None = None) -> None:
        self._given: list[tuple[Callable[[], Any] | None, tuple[Group, ...]]] = []
        if isinstance(process_group, Mapping):
            self._given = [(_hold(owner), _meshes.flatten(spread)) for owner, spread in process_group.items()]
        elif process_group is not None:
            self._given = [(None, _meshes.flatten(process_group))]

    def groups(self, optimizer: Any) -> tuple[Group, ...]:
        """The groups that share this optimizer's decision, in the order in which they are asked.

        Raises:
            RuntimeError: where the optimizer holds flat shards of FSDP1 and no group was given for it.
        """
        if not _meshes.running():
            return ()
        given = [groups for owner, groups in self._given if owner is None or owner() is optimizer]
        if not given:
            _meshes.refuse_flat_shards(optimizer)
        return _meshes.without_nested([*_flat(given), *_meshes.of_parameters(optimizer)])

    def agree(
        self,
        optimizer: Any,
        groups: Sequence[Group],
        overflow: bool,
        refusal: Exception | None = None,
        scale: float = 1.0,
    ) -> bool:
        """Whether any rank of the groups overflowed; the same answer on all of them.

        Args:
            optimizer: whose step is decided.
            groups: from :meth:`groups`. Without any, this rank decides alone.
            overflow: this rank's verdict.
            refusal: why this rank will not go on, if so. It is raised here after the others have been told.
            scale: the scale that this rank divides by.

        Raises:
            Exception: ``refusal`` itself; on the other ranks one of its class that names rank and reason.
            RuntimeError: on all ranks, where their scales differ or one of them is in ``update`` instead.
        """
        near = _meshes.parameters_of(optimizer) if groups else ()
        return _ask(groups, near, overflow, refusal, _STEP * _bits(scale))

    def agree_on_update(self, overflow: bool, scale: float = 1.0) -> bool:
        """Whether any rank of the given groups overflowed since the last update.

        Args:
            overflow: whether this rank did.
            scale: the scale that this update starts from, or the one that it sets.

        Raises:
            RuntimeError: on all ranks, where these scales differ or one of the ranks is in a step instead.
        """
        return _ask(self._all_given(), (), overflow, None, _UPDATE * _bits(scale))

    def agree_on_load(self, values: Mapping[str, float] | None, refusal: Exception | None = None) -> None:
        """Check that all ranks of the given groups load the same state.

        Args:
            values: what this rank is about to load; None where it refuses.
            refusal: why this rank will not load, if so. It is raised here after the others have been told.

        Raises:
            Exception: ``refusal`` itself; on the other ranks one of its class that names rank and reason.
            RuntimeError: on all ranks, where the states differ.
        """
        groups = self._all_given()
        words = _digest(values) if values is not None else ()
        answer = _reduce(groups, (), [_vote(refusal), *_both_ways(words or (0,) * 4)])
        _raise_refusal(groups, (), answer[0], refusal)
        if _differ(answer[1:]):
            raise RuntimeError(
                "load_state_dict was given different states on the ranks that share this scaler; rank "
                f"{dist.get_rank()} was given {dict(values or {})}. Nothing was loaded anywhere. Load the "
                "same checkpoint on every rank."
            )

    def _all_given(self) -> tuple[Group, ...]:
        return _meshes.without_nested(_flat(groups for _, groups in self._given)) if _meshes.running() else ()


def _ask(
    groups: Sequence[Group],
    near: Iterable[torch.Tensor],
    overflow: bool,
    refusal: Exception | None,
    scale: int,
) -> bool:
    """One question of four 32-bit numbers: overflow, who refuses, and the scale from both sides."""
    answer = _reduce(groups, near, [int(overflow), _vote(refusal), *_both_ways([scale])])
    _raise_refusal(groups, near, answer[1], refusal)
    if _differ(answer[2:]):
        raise RuntimeError(_scale_message(answer[2], answer[3], scale))
    return bool(answer[0])


def _reduce(groups: Sequence[Group], near: Iterable[torch.Tensor], numbers: list[int]) -> list[int]:
    """The elementwise maximum over all ranks of the groups; read by the host once per device."""
    if not groups:
        return numbers
    near = list(near)
    votes = torch.tensor(numbers, dtype=torch.int32)
    for group in groups:
        votes = votes.to(_meshes.device_for(group, near))
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    return [int(vote) for vote in votes.tolist()]


def _vote(refusal: Exception | None) -> int:
    """0 for a rank that goes on; the lowest rank that refuses has the highest vote."""
    if refusal is None or not _meshes.running():
        return 0
    return dist.get_world_size() - dist.get_rank()


def _raise_refusal(
    groups: Sequence[Group], near: Iterable[torch.Tensor], vote: int, refusal: Exception | None
) -> None:
    """Raise this rank's refusal or another's, whose words take one more reduction."""
    if vote and groups:
        rank = dist.get_world_size() - vote
        kind, words = _read_out(groups, near, refusal if rank == dist.get_rank() else None)
        if refusal is None:
            raise kind(
                f"rank {rank}, which shares this decision, refused; nothing has changed anywhere. {words}"
            )
    if refusal is not None:
        raise refusal


def _read_out(
    groups: Sequence[Group], near: Iterable[torch.Tensor], refusal: Exception | None
) -> tuple[type[Exception], str]:
    """The class and the words of the one refusal that is passed; the other ranks contribute zeros."""
    letters = bytearray(_MESSAGE_BYTES)
    if refusal is not None:
        kind = next((i for i, kind in enumerate(_REFUSALS) if isinstance(refusal, kind)), len(_REFUSALS) - 1)
        said = bytes([kind]) + str(refusal).encode()[: _MESSAGE_BYTES - 1]
        letters[: len(said)] = said
    heard = bytes(_reduce(groups, near, list(letters)))
    return _REFUSALS[heard[0]], heard[1:].rstrip(b"\0").decode(errors="ignore")


def _bits(scale: float) -> int:
    """A positive float32 as an integer that is exact and in the same order."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def _scale(bits: int) -> float:
    """The scale that ``_bits`` told, of a step or of an update."""
    return float(struct.unpack("<f", struct.pack("<i", abs(bits)))[0])


def _both_ways(numbers: Sequence[int]) -> list[int]:
    """Each number and its negative: after a maximum over ranks they cancel only where all gave the same."""
    return [side for number in numbers for side in (number, -number)]


def _differ(sides: Sequence[int]) -> bool:
    return any(up + down for up, down in zip(sides[::2], sides[1::2], strict=True))


def _digest(values: Mapping[str, float]) -> tuple[int, ...]:
    """Four 31-bit numbers that differ where the values do."""
    told = repr(sorted((key, float(value)) for key, value in values.items()))
    return tuple(word >> 1 for word in struct.unpack("<4I", blake2s(told.encode(), digest_size=16).digest()))


def _scale_message(up: int, down: int, own: int) -> str:
    rank = dist.get_rank()
    # A step tells its scale as a positive number, an update as a negative one: two positive maxima are a mixture.
    if up > 0 and down > 0:
        here, there = ("a step", "update()") if own > 0 else ("update()", "a step")
        return (
            f"rank {rank} is in {here} while a rank that shares its decisions is in {there}. All ranks of a "
            "group call unscale_, step and update in the same order; an optimizer that lives on some ranks only "
            "needs GradScaler(process_group={optimizer: its group})."
        )
    low, high = sorted(_scale(bits) for bits in (up, down))
    return (
        f"ranks that decide together hold different scales, from {low} to {high} (rank {rank}: {_scale(own)}); "
        "nothing was divided or stepped. Load the same state_dict on every rank and give update(new_scale) the "
        "same scale everywhere; where an optimizer lives on some ranks only, pass "
        "GradScaler(process_group={optimizer: group, ...}) with a group for each, so that update() is shared."
    )


def _flat(parts: Iterable[tuple[Group, ...]]) -> list[Group]:
    return [group for part in parts for group in part]


def _hold(owner: Any) -> Callable[[], Any]:
    """A weak reference where the object allows one."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner
