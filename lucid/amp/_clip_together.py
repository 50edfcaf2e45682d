"""Unscaling and clipping by the norm and the verdict of all ranks that share an optimizer.

Knows this rank's gradients and which of them it counts. Refuses to know stages, and what travels between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lucid.amp import _division, _norms
from lucid.amp._clip import Clipped, Clipping, Split, as_tensor, is_doubtful, is_telling, multiply_, scale_down_, total
from lucid.amp._consensus import Poll, Ranks
from lucid.amp._division import Divisor
from lucid.amp._gradients import Gradients
from lucid.amp._shares import Part, Shares
from lucid.amp._torch import Bucket, by_device_and_dtype
from lucid.amp._unread import Unread

_WIDTHS = (torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of gradients, the widest last; a bit for each tells the ranks which there are."""


class Together:
    """A clip by all ranks: making it reads, :meth:`agree` asks the others, only :meth:`clip_` changes anything.

    Raises:
        ValueError: the norm is of order 0.
    """

    def __init__(self, split: Split, gradients: Gradients, divisor: Divisor, clipping: Clipping, ranks: Ranks) -> None:
        if clipping.order == 0:
            raise ValueError("norm_type 0 counts tensors, and ranks hold parts of tensors. Use another norm_type.")
        self._gradients, self._divisor, self._clipping, self._ranks = gradients, divisor, clipping, ranks
        fresh = {id(tensor) for tensor in gradients.fresh}
        parameters = {id(tensor): parameter for parameter, tensor in gradients.pairs}
        self._parts = [Part(parameters[id(tensor)], tensor, id(tensor) in fresh) for tensor in split.chosen]
        self._beside = [Part(parameters[id(tensor)], tensor, id(tensor) in fresh) for tensor in split.others]
        self._shares = Shares(self._parts, ranks.groups, ranks.given)
        self._asked = by_device_and_dtype(split.asked)
        self._widths = sum(1 << _WIDTHS.index(dtype) for dtype in {dtype for _, dtype, _ in self._asked})
        self._unread = self._powers() if _norms.is_additive(clipping.order) else None
        self._poll = self._read() if self._unread is None else self._polled(0.0, True)

    def agree(self) -> None:
        """Find the norm over all ranks, and whether any of them overflowed.

        Raises:
            Exception: as :meth:`Ranks.measure`.
        """
        scale = self._divisor.scale
        poll = self._ranks.measure(self._poll, scale, unread=self._unread)
        if poll.overflow and self._unread is not None:
            # Some rank is in doubt: all of them look again.
            poll = self._ranks.measure(self._ranks.or_tell(self._read, scale, clips=True), scale)
        if poll.questions and not poll.overflow:
            counted = self._shares.resolve(poll.questions, self._ranks)
            (norm,), finite = self._ranks.or_tell(lambda: self._look([counted]), scale, clips=True)
            rest = self._ranks.measure(self._polled(norm, finite), scale)
            norm = _norms.combined([poll.norm, rest.norm], poll.order)
            poll = poll._replace(norm=norm, overflow=rest.overflow)
        self._poll = poll

    def clip_(self) -> Clipped:
        """Divide all gradients in place by the scale, and clip the chosen ones."""
        poll, divisor = self._poll, self._divisor
        if poll.overflow:
            divisor.divide_(self._gradients.buckets, judged=False)
            return Clipped(self._norm(math.inf), overflow=True)
        coefficient = self._clipping.coefficient(poll.norm)
        multiply_(_buckets(self._parts, scaled=True), divisor, coefficient)
        scale_down_(_buckets(self._parts, scaled=False), coefficient)
        divisor.divide_(_buckets(self._beside, scaled=True), judged=False)
        return Clipped(self._norm(poll.norm), overflow=False)

    def _powers(self) -> Unread:
        """What this rank's poll is made of in all ordinary cases; the host reads nothing."""
        order, scale = self._clipping.order, self._divisor.scale
        counted, others = self._shares.counted, self._shares.rest + self._beside
        powers = [_norms.power(_buckets(parts, scaled=True), order) for parts in (counted, others)]
        doubts = [is_doubtful(power, order, scale) for power in powers[0] + powers[1]]
        if any(not part.scaled for part in counted + others):
            doubts.append(torch.ones((), dtype=torch.bool, device="cpu"))
        return Unread(doubts, powers[0], order, scale)

    def _read(self) -> Poll:
        """This rank's poll, of numbers that the host has read and looked into."""
        (norm, _), finite = self._look([self._shares.counted, self._shares.rest + self._beside])
        return self._polled(norm, finite)

    def _polled(self, norm: float, finite: bool) -> Poll:
        order, max_norm = self._clipping.order, self._clipping.max_norm
        return Poll(norm, order, max_norm, self._shares.questions, not finite, self._widths)

    def _norm(self, norm: float) -> torch.Tensor:
        dtypes = [dtype for bit, dtype in enumerate(_WIDTHS) if self._poll.widths >> bit & 1]
        return as_tensor(norm, self._asked, dtypes)

    def _look(self, lists: Sequence[Sequence[Part]]) -> tuple[list[float], bool]:
        """Return the norm of the true values of each list, and whether all of them are finite; changes nothing."""
        order = self._clipping.order
        halves = [_buckets(parts, scaled) for parts in lists for scaled in (True, False)]
        powers = [_norms.power(half, order) if _norms.is_additive(order) else [] for half in halves]
        numbers = iter(_division.numbers([power for parts in powers for power in parts]))
        totals = [[next(numbers) for _ in parts] for parts in powers]
        norms, all_finite = [], True
        for index, (half, powers_of_half) in enumerate(zip(halves, totals, strict=True)):
            divisor = self._divisor if index % 2 == 0 else Divisor(1.0)
            norm, finite = _norm_of(half, powers_of_half, divisor, order)
            norms.append(norm)
            all_finite = all_finite and finite
        return [_norms.combined(pair, order) for pair in zip(norms[::2], norms[1::2], strict=True)], all_finite


def _buckets(parts: Sequence[Part], scaled: bool) -> list[Bucket]:
    return by_device_and_dtype([part.values for part in parts if part.scaled is scaled])


def _norm_of(buckets: list[Bucket], totals: list[float], divisor: Divisor, order: float) -> tuple[float, bool]:
    """Return the norm of tensors over the scale, and whether every quotient is finite."""
    if not buckets:
        return (0.0 if order > 0 else math.inf), True
    if _norms.is_additive(order):
        power = total(totals, order)
        norm = _norms.root(power, order) / divisor.scale
        if is_telling(power, norm):
            return norm, True
    if divisor.read(divisor.judge_quotients(buckets)):
        return math.inf, False
    if _norms.is_additive(order):
        return _norms.robust(buckets, order) / divisor.scale, True
    return _norms.combined(_division.numbers(_norms.norms(buckets, order)), order) / divisor.scale, True
