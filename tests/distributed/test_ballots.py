"""What ranks exchange, as integers: exact, in order, and readable on the other side."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucid.amp import _ballots

SCALES = st.floats(2.0**-126, 2.0**127, width=32)


@given(SCALES, SCALES)
def test_scales_keep_their_order_and_value(one: float, other: float) -> None:
    """A larger scale is a larger integer of 31 bits, and the scale comes back from either sign."""
    first, second = _ballots.of_scale(one), _ballots.of_scale(other)
    assert (first < second) == (one < other)
    assert 0 < first < 2**31
    assert _ballots.scale_of(first) == _ballots.scale_of(-first) == one


@given(st.floats())
def test_a_norm_comes_back(norm: float) -> None:
    """Every float64, through two 32-bit integers."""
    back = _ballots.norm_of(torch.tensor(_ballots.of_norm(norm), dtype=torch.int32).tolist())
    assert back == norm or (math.isnan(back) and math.isnan(norm))


@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=4))
def test_maxima_differ_only_where_ranks_did(told: list[int]) -> None:
    """The maximum of a number and of its negative cancel exactly where all ranks gave the same."""
    sides = [_ballots.both_ways([number]) for number in told]
    maxima = [max(side) for side in zip(*sides, strict=True)]
    assert _ballots.differ(maxima) == (len(set(told)) > 1)


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, TypeError, RuntimeError])
def test_a_refusal_is_raised_as_what_it_was(kind: type[Exception]) -> None:
    """Class and words arrive, the rank is named, and 1024 numbers below 256 carry them."""
    letters = _ballots.of_refusal(kind("the gradient of 'größe'"))
    assert len(letters) == 1024
    assert all(0 <= letter < 256 for letter in letters)
    heard = _ballots.refusal_of(letters, 3)
    assert type(heard) is kind
    assert "rank 3" in str(heard)
    assert "the gradient of 'größe'" in str(heard)


def test_any_other_error_is_a_runtime_error() -> None:
    """Out of memory on one rank is a RuntimeError on the others."""
    assert type(_ballots.refusal_of(_ballots.of_refusal(MemoryError("full")), 0)) is RuntimeError


def test_a_long_refusal_is_cut_between_letters() -> None:
    """Words of more than a kilobyte are shortened, not garbled."""
    words = str(_ballots.refusal_of(_ballots.of_refusal(ValueError("ö" * 2000)), 0))
    assert set(words.partition("anywhere. ")[2]) == {"ö"}


def test_states_are_told_apart() -> None:
    """Five equal values give equal digests in any order; a change of any of them gives another."""
    state = {"scale": 8.0, "growth_factor": 2.0, "growth_interval": 2000}
    reversed_state = dict(reversed(state.items()))
    assert _ballots.of_state(state) == _ballots.of_state(reversed_state)
    assert _ballots.of_state(state) == _ballots.of_state(state | {"growth_interval": 2000.0})
    for key in state:
        assert _ballots.of_state(state) != _ballots.of_state(state | {key: 3})
