"""How a scale, a refusal and a state are told in a few integers whose maximum over all ranks is the answer.

Pure: knows numbers, bytes and words. Refuses to know processes and tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2s

LETTERS = 1024
"""Bytes of a refusal that the other ranks are told."""

STEP, UPDATE = 1, -1
"""What a scale is multiplied by as a ballot. Two positive maxima, of it and its negative, are one of each."""

# What a refusal may be, the narrower class first. The other ranks raise the class that the refusing rank raises: a
# program that catches it then goes the same way everywhere.
_REFUSALS: tuple[type[Exception], ...] = (NotImplementedError, ValueError, TypeError, RuntimeError)


def of_scale(scale: float) -> int:
    """A positive float32 as an integer, exact and in the same order."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def scale_of(ballot: int) -> float:
    """The scale that a step or an update told."""
    return float(struct.unpack("<f", struct.pack("<i", abs(ballot)))[0])


def of_norm(norm: float) -> tuple[int, int]:
    """A float64 as two 32-bit integers."""
    low, high = struct.unpack("<2i", struct.pack("<d", norm))
    return low, high


def norm_of(ballot: Sequence[int]) -> float:
    """The float64 that two 32-bit integers are."""
    return float(struct.unpack("<d", struct.pack("<2i", *ballot))[0])


def of_state(values: Mapping[str, float]) -> tuple[int, ...]:
    """Four 31-bit numbers that differ where the values do."""
    told = repr(sorted((key, float(value)) for key, value in values.items()))
    return tuple(word >> 1 for word in struct.unpack("<4I", blake2s(told.encode(), digest_size=16).digest()))


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


def both_ways(numbers: Sequence[int]) -> list[int]:
    """Each number and its negative: after a maximum over ranks they cancel only where all gave the same."""
    return [side for number in numbers for side in (number, -number)]


def differ(sides: Sequence[int]) -> bool:
    """Whether ranks gave different numbers."""
    return any(up + down for up, down in zip(sides[::2], sides[1::2], strict=True))


def discord(up: int, down: int, own: int, rank: int) -> RuntimeError:
    """What a rank raises that told ``own`` where the maxima are ``up`` and ``down``."""
    if up > 0 and down > 0:
        here, there = ("a step", "update()") if own > 0 else ("update()", "a step")
        return RuntimeError(
            f"rank {rank} is in {here} while a rank that shares its decisions is in {there}. All ranks of a "
            "group call unscale_, step and update in the same order; an optimizer that lives on some ranks only "
            "needs GradScaler(process_group={optimizer: its group})."
        )
    low, high = sorted(map(scale_of, (up, down)))
    return RuntimeError(
        f"ranks that decide together hold different scales, from {low} to {high} (rank {rank}: {scale_of(own)}); "
        "nothing was divided or stepped. Load the same state_dict on every rank and give update(new_scale) the "
        "same scale everywhere; where an optimizer lives on some ranks only, pass "
        "GradScaler(process_group={optimizer: group, ...}) with a group for each, so that update() is shared."
    )


def different_states(values: Mapping[str, float], rank: int) -> RuntimeError:
    """What a rank raises that was about to load ``values``."""
    return RuntimeError(
        "load_state_dict was given different states on the ranks that share this scaler; "
        f"rank {rank} was given {dict(values)}. Nothing was loaded anywhere. Load the same checkpoint on every rank."
    )
