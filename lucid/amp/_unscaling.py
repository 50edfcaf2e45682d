"""Unscaling in an iteration: every gradient divided once, and one verdict for all ranks that share it.

Knows optimizers with their turns, the divisor and the other ranks. Refuses to know when a scale moves, and what
follows from a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lucid.amp import _fused, _torch
from lucid.amp._clip import Alone, Clipped, Clipping
from lucid.amp._clip_together import Together
from lucid.amp._consensus import Consensus, Ranks
from lucid.amp._division import Divisor, Verdict
from lucid.amp._gradients import Gradients
from lucid.amp._reading import Reading
from lucid.amp._seen import Seen
from lucid.amp._stages import UNSCALED, Turn
from lucid.amp._torch import by_device_and_dtype
from lucid.amp._unread import Unread


class InKernel(NamedTuple):
    """Gradients that an optimizer's own kernel is to divide, and the reading that found them finite."""

    gradients: Gradients
    reading: Reading


class Unscaling:
    """The gradients of one iteration: those divided so far, and how the next ones are.

    Attributes:
        divided: the gradients divided so far; once cleared, they may be divided again.
    """

    def __init__(self, divisor: Divisor, consensus: Consensus) -> None:
        self._divisor = divisor
        self._consensus = consensus
        self.divided = Seen()

    def is_due(self, optimizer: Any, turn: Turn) -> bool:
        """Whether unscaled gradients must be unscaled again: a step that raised did it, and they are others now.

        A rank that has none any more asks the others, too, who may have new ones.
        """
        if turn.unscaled_by_step is None:
            return False
        try:
            gradients = Gradients(optimizer, self.divided)
            return bool(gradients.fresh) or len(gradients.wholes) != turn.unscaled_by_step
        except Exception:  # a refusal, which unscale tells the other ranks
            return True

    def refuse_left_over(self, optimizer: Any, due: bool) -> None:
        """Refuse a fused optimizer with another scaler's factor, where ``due`` with a word to the other ranks."""
        try:
            _fused.refuse_left_over(optimizer)
        except RuntimeError as refusal:
            ranks = self._consensus.of(optimizer) if due else None
            if ranks is not None:
                ranks.tell(refusal, self._divisor.scale)
            raise

    def unscale(self, optimizer: Any, turn: Turn, by_step: bool = False) -> InKernel | None:
        """Divide an optimizer's gradients, or return what lets its own kernel do it (see :meth:`in_kernel`).

        Args:
            optimizer: whose gradients are divided.
            turn: its turn, which then is unscaled and knows the verdict; not yet where the kernel is to divide.
            by_step: whether the optimizer is about to be stepped.
        """
        ranks = self._consensus.of(optimizer) if _torch.is_distributed() else None
        if ranks is not None or (by_step and getattr(optimizer, _torch.TAKES_FACTOR, False)):
            return self._read_and_unscale(optimizer, turn, by_step, ranks)
        self._divide(turn, Gradients(optimizer, self.divided), by_step)
        return None

    @_torch.without_grad
    def _read_and_unscale(self, optimizer: Any, turn: Turn, by_step: bool, ranks: Ranks | None) -> InKernel | None:
        """Unscale where a read may have to come first: all ranks must agree, or the optimizer's kernel may divide."""
        try:
            gradients = Gradients(optimizer, self.divided)
            takes_factor = by_step and getattr(optimizer, _torch.TAKES_FACTOR, False)
            in_kernel = takes_factor and _fused.divides(optimizer, gradients, self._divisor)
            overflow = asked = None
            if in_kernel or ranks is not None:
                reading = _fused.read(optimizer) if in_kernel else Reading([gradients.fresh])
                if ranks is None:
                    overflow = self._overflows(gradients, reading)
                else:
                    asked = ranks, self._doubts(gradients, reading)
        except Exception as refusal:
            if ranks is not None:
                ranks.tell(refusal, self._divisor.scale)
            raise
        if asked is not None:
            overflow = self._agree(*asked, gradients, reading)
        if in_kernel and not overflow:
            return InKernel(gradients, reading)
        self._divide(turn, gradients, by_step, overflow)
        return None

    @contextmanager
    def in_kernel(self, optimizer: Any, turn: Turn, given: InKernel) -> Iterator[None]:
        """Let the optimizer's step divide; what it leaves scaled when it raises is divided here."""
        try:
            self._mark(turn, given.gradients)
            turn.overflow, turn.unscaled_by_step = False, len(given.gradients.wholes)
            with _fused.dividing(optimizer, given.reading, self._divisor):
                yield
        except BaseException:
            # From before the kernel, from between two of its groups, or from a hook after it.
            self._divide_the_rest(turn, given.reading)
            raise

    @_torch.without_grad
    def _divide_the_rest(self, turn: Turn, reading: Reading) -> None:
        try:
            self._divisor.divide_(reading.undivided(self._divisor))
        except BaseException:
            # Nobody can tell now what is divided: no retry steps by it.
            turn.overflow, turn.unscaled_by_step = True, None
            raise

    def _overflows(self, gradients: Gradients, reading: Reading) -> bool:
        """Whether a quotient of this process overflows; nothing is changed."""
        if reading.overflows(self._divisor):
            return True
        return self._divisor.read(self._divisor.judge(by_device_and_dtype(gradients.divided)))

    def _doubts(self, gradients: Gradients, reading: Reading) -> Unread:
        """What :meth:`_overflows` will be asked about, if any rank has such doubts; the host reads nothing."""
        divided = self._divisor.judge(by_device_and_dtype(gradients.divided))
        return Unread([*reading.doubts(self._divisor), *divided])

    def _agree(self, ranks: Ranks, doubts: Unread, gradients: Gradients, reading: Reading) -> bool:
        """Whether a quotient of any rank overflows; where one of them has doubts, all look again and ask again."""
        scale = self._divisor.scale
        if not ranks.agree(doubts, scale):
            return False
        return ranks.agree(ranks.or_tell(lambda: self._overflows(gradients, reading), scale), scale)

    @_torch.without_grad
    def clip(self, optimizer: Any, turn: Turn, asked: Callable[[], Clipping]) -> Clipped:
        """Divide an optimizer's gradients and clip them, on all ranks by the norm of all.

        Args:
            optimizer: whose gradients are divided.
            turn: its turn, which then is unscaled and knows the verdict.
            asked: makes what is asked for, or refuses to.
        """
        ranks = self._consensus.of(optimizer) if _torch.is_distributed() else None
        try:
            clipping, gradients = asked(), Gradients(optimizer, self.divided)
            parts = clipping.split(optimizer, gradients), gradients, self._divisor, clipping
            clip = Alone(*parts) if ranks is None else Together(*parts, ranks)
        except Exception as refusal:
            if ranks is not None:
                ranks.tell(refusal, self._divisor.scale, clips=True)
            raise
        if isinstance(clip, Together):
            clip.agree()
        self._mark(turn, gradients)
        clipped = clip.clip_()
        turn.overflow = clipped.overflow
        return clipped

    def overflowed(self, turn: Turn) -> bool:
        """Whether the turn's optimizer overflowed: read once by the host, and kept."""
        overflow: bool | Verdict = turn.overflow
        if isinstance(overflow, list):
            overflow = turn.overflow = self._divisor.read(overflow)
        return overflow

    def _divide(self, turn: Turn, gradients: Gradients, by_step: bool, overflow: bool | None = None) -> None:
        """Divide, and judge where the verdict is not known: what was divided before, too."""
        self._mark(turn, gradients)
        verdict = self._divisor.divide_(gradients.buckets, judged=overflow is None)
        if overflow is None and gradients.divided:
            self._divisor.judge(by_device_and_dtype(gradients.divided), verdict)
        turn.unscaled_by_step = len(gradients.wholes) if by_step else None
        turn.overflow = verdict if overflow is None else overflow

    def _mark(self, turn: Turn, gradients: Gradients) -> None:
        """Note gradients as divided and, until the verdict is known, as overflowed.

        Memory may run out, or Ctrl-C come, when some are divided and some are not: no retry divides or steps by them.
        """
        turn.stage, turn.overflow, turn.unscaled_by_step = UNSCALED, True, None
        if gradients.coalesced:
            gradients.put_back()
        self.divided.add(gradients.wholes, gradients.places)
