"""Did any rank overflow, and do all ranks hold the same scale?

With ``_rounds`` the only file that talks to other processes. Knows what is asked, of which groups, and what the
answer means. Refuses to know gradients: it is told this rank's verdict, or this rank's reason to refuse, and
returns everybody's.

A question is one MAX reduction of a few numbers over each group in turn. In a grid of ranks the maximum over
the rows, then over the columns, is the maximum over all: no rank needs a group that spans them all.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lucid.amp import _ballots, _meshes, _norms, _rounds
from lucid.amp._unread import Unread, as_one

if TYPE_CHECKING:
    from lucid.amp._meshes import Group, Spread

_Seen = TypeVar("_Seen")


class Poll(NamedTuple):
    """One rank's part of a norm, or that of all.

    Attributes:
        norm: of the true gradients; inf or NaN where it has no value.
        order: the order of the norm.
        max_norm: its bound.
        questions: which questions must be asked before the norm is complete; below 2⁸.
        overflow: whether a quotient was not finite.
        widths: which dtypes the gradients have, of bits below 2⁸ that mean the same on all ranks.
    """

    norm: float
    order: float
    max_norm: float = math.inf
    questions: int = 0
    overflow: bool = False
    widths: int = 0


class Ranks:
    """The processes that share an optimizer's decision.

    Attributes:
        groups: their groups, in the order in which they are asked.
        given: those of them that the user gave.
    """

    def __init__(self, optimizer: Any, groups: tuple[Group, ...], given: list[Group]) -> None:
        self.groups = groups
        self.given = given
        self._near = _meshes.parameters_of(optimizer)

    def agree(self, overflow: bool | Unread, scale: float, refusal: Exception | None = None) -> bool:
        """Whether any rank overflowed; the same answer on all of them.

        Args:
            overflow: this rank's verdict, or the doubts of it; ``True`` then means that a rank has some.
            scale: the scale that this rank divides by.
            refusal: why this rank will not go on, if so. It is raised here after the others have been told.

        Raises:
            Exception: ``refusal`` itself; on the other ranks one of its class that names rank and reason.
            RuntimeError: on all ranks, where their scales differ or one of them is in another call instead.
        """
        return _ask(self.groups, self._near, _ballots.STEP, overflow, refusal, _ballots.of_scale(scale))

    def measure(self, poll: Poll, scale: float, refusal: Exception | None = None, unread: Unread | None = None) -> Poll:
        """What :meth:`agree` decides and, in the same collective, the norm over all ranks.

        Args:
            poll: this rank's verdict, its part of the norm, and the questions that it must ask.
            scale: the scale that this rank divides by.
            refusal: why this rank will not go on, if so.
            unread: the verdict and the norm, if the poll has them not; ``overflow`` then says that a rank has doubts.

        Raises:
            Exception: as :meth:`agree`.
            RuntimeError: as :meth:`agree`, and where ranks ask for other norms or bounds.
        """
        try:
            message = _rounds.message(self.groups, self._near, _told(poll, scale, refusal), unread)
        except Exception as failure:
            if unread is None:
                raise
            return self.measure(poll, scale, failure)
        rows = _rounds.gather(self.groups, self._near, message, lambda rows: as_one(rows, poll.order))
        flags = functools.reduce(operator.or_, (row[0] for row in rows))
        if flags & 2 or len({row[1] for row in rows}) > 1:
            self.agree(poll.overflow, scale, refusal)
            raise _ballots.different_clips(poll.order, poll.max_norm, dist.get_rank())
        norm = _norms.combined([_ballots.norm_of(row[2:]) for row in rows], poll.order)
        return poll._replace(norm=norm, questions=flags >> 2 & 255, overflow=bool(flags & 1), widths=flags >> 10)

    def tell(self, refusal: Exception, scale: float, clips: bool = False) -> None:
        """Tell the others, who step or clip, of a refusal that is raised here next, whatever comes of the telling."""
        with contextlib.suppress(Exception):
            if clips:
                self.measure(Poll(0.0, 2.0), scale, refusal)
            else:
                self.agree(False, scale, refusal)

    def or_tell(self, look: Callable[[], _Seen], scale: float, clips: bool = False) -> _Seen:
        """What is seen; an error on the way is told to the others, who step or clip, and raised."""
        try:
            return look()
        except Exception as refusal:
            self.tell(refusal, scale, clips)
            raise

    def are_first(self, groups: Sequence[Group], look: Callable[[], Sequence[object]]) -> list[bool]:
        """Whether no lower rank of any of the groups has each of these marks. Every rank of them asks.

        Args:
            groups: the groups.
            look: returns the marks; what it raises is raised on all ranks.
        """
        marks: Sequence[object] = ()
        refusal: tuple[list[int], int] | None = None
        failure: Exception | None = None
        try:
            marks = look()
        except Exception as error:
            failure, refusal = error, (_ballots.of_refusal(error), dist.get_rank())
        first = [True] * len(marks)
        for group in groups:
            heard: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(heard, (list(marks), refusal), group=group)
            refusal = next((told for _, told in heard if told is not None), None)
            lower = {mark for marks_of_one, _ in heard[: dist.get_rank(group)] for mark in marks_of_one}
            first = [was and mark not in lower for was, mark in zip(first, marks, strict=True)]
        if refusal is not None:
            raise failure or _ballots.refusal_of(*refusal)
        return first

    def summed(self, addends: Any) -> torch.Tensor:
        """This rank's values of a DTensor after the addends of all ranks were added."""
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if place.is_partial() else place for place in addends.placements]
        return _meshes.local(addends.redistribute(placements=placements))


class Consensus:
    """What the processes that share a model decide together.

    Args:
        process_group: the processes that decide together, where the parameters cannot tell: a ProcessGroup, a
            DeviceMesh, a sequence of them, or a mapping from optimizers to these. None: what DTensors tell.

    Attributes:
        spreads: those groups, and for each what returns its optimizer; None where they are for all optimizers.

    Raises:
        TypeError: for anything else.
    """

    def __init__(self, process_group: Spread | Mapping[Any, Spread] | None = None) -> None:
        self.spreads: list[tuple[Callable[[], Any] | None, tuple[Group, ...]]] = []
        if isinstance(process_group, Mapping):
            self.spreads = [(_hold(owner), _meshes.flatten(spread)) for owner, spread in process_group.items()]
        elif process_group is not None:
            self.spreads = [(None, _meshes.flatten(process_group))]

    def of(self, optimizer: Any) -> Ranks | None:
        """The processes that share this optimizer's decision; None where this one decides alone.

        Raises:
            RuntimeError: where the optimizer holds flat shards of FSDP1 and no group was given for it.
        """
        if not _meshes.running():
            return None
        given = _flat(groups for owner, groups in self.spreads if owner is None or owner() is optimizer)
        if not given:
            _meshes.refuse_flat_shards(optimizer)
        groups = _meshes.without_nested([*given, *_meshes.of_parameters(optimizer)])
        return Ranks(optimizer, groups, given) if groups else None

    def agree_on_update(self, overflow: bool, scale: float, refusal: Exception | None = None) -> bool:
        """Whether any rank of the given groups overflowed since the last update.

        Args:
            overflow: whether this rank did.
            scale: the scale that this update starts from, or the one that it sets.
            refusal: why this rank will not update, if so. It is raised here after the others have been told.

        Raises:
            Exception: ``refusal`` itself; on the other ranks one of its class that names rank and reason.
            RuntimeError: on all ranks, where these scales differ or one of the ranks is in another call instead.
        """
        return _ask(self._all_given(), (), _ballots.UPDATE, overflow, refusal, _ballots.of_scale(scale))

    def agree_on_load(self, values: Mapping[str, float], refusal: Exception | None = None) -> None:
        """Check that all ranks of the given groups load the same state.

        Args:
            values: what this rank is about to load.
            refusal: why this rank will not load, if so. It is raised here after the others have been told.

        Raises:
            Exception: ``refusal`` itself; on the other ranks one of its class, which names the rank and the reason.
            RuntimeError: on all ranks, where the states differ or one of the ranks is in another call instead.
        """
        _ask(self._all_given(), (), _ballots.LOAD, False, refusal, _ballots.of_state(values), values)

    def _all_given(self) -> tuple[Group, ...]:
        return _meshes.without_nested(_flat(groups for _, groups in self.spreads)) if _meshes.running() else ()


def _ask(
    groups: Sequence[Group],
    near: Iterable[torch.Tensor],
    call: int,
    overflow: bool | Unread,
    refusal: Exception | None,
    word: int,
    values: Mapping[str, float] | None = None,
) -> bool:
    """One question of four 32-bit numbers, whatever is asked, so that any two of them meet."""
    near = list(near)
    known, unread = (overflow, None) if isinstance(overflow, bool) else (False, overflow)
    try:
        message = _rounds.message(groups, near, _ballots.question(call, known, _vote(refusal), word), unread)
    except Exception as failure:
        if unread is None:
            raise
        return _ask(groups, near, call, False, failure, word)
    answer = _ballots.answer(_rounds.reduce(groups, near, message))
    if answer.calls != (call, call):
        raise refusal or _ballots.different_calls(answer.calls, call, dist.get_rank())
    _raise_refusal(groups, near, answer.vote, refusal)
    if answer.words != (word, word):
        if values is not None:
            raise _ballots.different_states(values, dist.get_rank())
        raise _ballots.different_scales(answer.words, word, dist.get_rank())
    return answer.overflow


def _told(poll: Poll, scale: float, refusal: Exception | None) -> list[int]:
    flags = poll.widths << 10 | poll.questions << 2 | (refusal is not None) << 1 | poll.overflow
    return [flags, _ballots.of_clip(scale, poll.order, poll.max_norm), *_ballots.of_norm(poll.norm)]


def _vote(refusal: Exception | None) -> int:
    """0 for a rank that goes on; the lowest rank that refuses has the highest vote."""
    if refusal is None or not _meshes.running():
        return 0
    return dist.get_world_size() - dist.get_rank()


def _raise_refusal(groups: Sequence[Group], near: Iterable[torch.Tensor], vote: int, refusal: Exception | None) -> None:
    """Raise this rank's refusal or another's, whose words take one more reduction."""
    if vote and groups:
        rank = dist.get_world_size() - vote
        letters = _ballots.of_refusal(refusal) if refusal and rank == dist.get_rank() else [0] * _ballots.LETTERS
        letters = _rounds.reduce(groups, near, _rounds.message(groups, near, letters))
        if refusal is None:
            raise _ballots.refusal_of(letters, rank)
    if refusal is not None:
        raise refusal


def _flat(parts: Iterable[tuple[Group, ...]]) -> list[Group]:
    return [group for part in parts for group in part]


def _hold(owner: Any) -> Callable[[], Any]:
    """A weak reference where the object allows one."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner
