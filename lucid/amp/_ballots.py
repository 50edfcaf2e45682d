"""How a scale, a refusal and a state are told in a few integers whose maximum over all ranks is the answer.

Pure: knows numbers, bytes and words. Refuses to know processes and tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import NamedTuple

LETTERS = 1024
"""Bytes of a refusal that the other ranks are told."""

STEP, UPDATE, LOAD = range(3)
"""What a rank is in while it asks."""

_CALLS = ("a step", "update()", "load_state_dict()")
_VOTES = 2**24
"""More than there are ranks."""

# What a refusal may be, the narrower class first. The other ranks raise the class that the refusing rank raises: a
# program that catches it then goes the same way everywhere.
_REFUSALS: tuple[type[Exception], ...] = (NotImplementedError, ValueError, TypeError, RuntimeError)


class Answer(NamedTuple):
    """What the maxima of all ranks' questions say.

    Attributes:
        calls: the first and the last of STEP, UPDATE and LOAD that a rank is in.
        overflow: whether any rank's quotients overflowed.
        vote: of the rank that refuses, 0 if none does.
        words: the lowest and the highest word of any rank: a scale, or a state.
    """

    calls: tuple[int, int]
    overflow: bool
    vote: int
    words: tuple[int, int]


def question(call: int, overflow: bool, vote: int, word: int) -> list[int]:
    """Four 32-bit integers whose maxima over all ranks are the answer; vote below 2²⁴, word of 31 bits."""
    return [2 * call + overflow, _VOTES * (LOAD - call) + vote, word, -word]


def answer(maxima: Sequence[int]) -> Answer:
    """What they say; a call or a word that differs has a lowest and a highest one."""
    calls = (LOAD - maxima[1] // _VOTES, maxima[0] // 2)
    return Answer(calls, bool(maxima[0] % 2), maxima[1] % _VOTES, (-maxima[3], maxima[2]))


def of_scale(scale: float) -> int:
    """A positive float32 as an integer of 31 bits, exact and in the same order."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def scale_of(word: int) -> float:
    """The scale that a step or an update told."""
    return float(struct.unpack("<f", struct.pack("<i", word))[0])


def of_norm(norm: float) -> tuple[int, int]:
    """A float64 as two 32-bit integers, in the order in which this machine keeps them."""
    first, second = struct.unpack("=2i", struct.pack("=d", norm))
    return first, second


def norm_of(ballot: Sequence[int]) -> float:
    """The float64 that two 32-bit integers are."""
    return float(struct.unpack("=d", struct.pack("=2i", *ballot))[0])


def of_state(values: Mapping[str, float]) -> int:
    """31 bits that differ where the values do, but once in 2³¹ times."""
    return _digest(sorted((key, float(value)) for key, value in values.items()))


def of_clip(scale: float, order: float, max_norm: float) -> int:
    """31 bits that differ where the scale, the order of the norm or its bound does."""
    return _digest([scale, order, max_norm])


def _digest(values: object) -> int:
    return int.from_bytes(blake2s(repr(values).encode(), digest_size=4).digest(), "little") >> 1


def of_refusal(refusal: Exception) -> list[int]:
    """The class and the words of a refusal as bytes."""
    kind = next((i for i, kind in enumerate(_REFUSALS) if isinstance(refusal, kind)), len(_REFUSALS) - 1)
    return list((bytes([kind]) + str(refusal).encode())[:LETTERS].ljust(LETTERS, b"\0"))


def refusal_of(letters: Sequence[int], rank: int) -> Exception:
    """What the other ranks raise."""
    words = bytes(letters[1:]).rstrip(b"\0").decode(errors="ignore")
    return _REFUSALS[letters[0]](
        f"rank {rank}, which shares this decision, refused; nothing has changed anywhere. {words}"
    )


def different_calls(calls: tuple[int, int], own: int, rank: int) -> RuntimeError:
    """What a rank raises that is in one call while another rank is in another."""
    other = calls[0] if calls[1] == own else calls[1]
    return RuntimeError(
        f"rank {rank} is in {_CALLS[own]} while a rank that shares its decisions is in {_CALLS[other]}. All ranks of a "
        "group call unscale_, step, update and load_state_dict in the same order; an optimizer that lives on some "
        "ranks only needs GradScaler(process_group={optimizer: its group})."
    )


def different_scales(words: tuple[int, int], own: int, rank: int) -> RuntimeError:
    """What a rank raises whose scale, or that of another rank, is not everybody's."""
    low, high = map(scale_of, words)
    return RuntimeError(
        f"ranks that decide together hold different scales, from {low} to {high} (rank {rank}: {scale_of(own)}); "
        "nothing was divided or stepped. Load the same state_dict on every rank and give update(new_scale) the "
        "same scale everywhere; where an optimizer lives on some ranks only, pass "
        "GradScaler(process_group={optimizer: group, ...}) with a group for each, so that update() is shared."
    )


def different_clips(order: float, max_norm: float, rank: int) -> RuntimeError:
    """What a rank raises that asks for another norm or bound than the other ranks."""
    return RuntimeError(
        "clip_grad_norm_ was asked for different norms or bounds on the ranks that share an optimizer; rank "
        f"{rank}: max_norm={max_norm}, norm_type={order}. Nothing was divided. Give the same to all of them."
    )


def different_states(values: Mapping[str, float], rank: int) -> RuntimeError:
    """What a rank raises that was about to load ``values``."""
    return RuntimeError(
        "load_state_dict was given different states on the ranks that share this scaler; "
        f"rank {rank} was given {dict(values)}. Nothing was loaded anywhere. Load the same checkpoint on every rank."
    )
