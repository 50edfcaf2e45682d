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
    """A larger scale is a larger integer of 31 bits, and the scale comes back."""
    first, second = _ballots.of_scale(one), _ballots.of_scale(other)
    assert (first < second) == (one < other)
    assert 0 < first < 2**31
    assert _ballots.scale_of(first) == one


@given(st.floats())
def test_a_norm_comes_back(norm: float) -> None:
    """Every float64, through two 32-bit integers."""
    back = _ballots.norm_of(torch.tensor(_ballots.of_norm(norm), dtype=torch.int32).tolist())
    assert back == norm or (math.isnan(back) and math.isnan(norm))


CALLS = st.sampled_from([_ballots.STEP, _ballots.UPDATE, _ballots.LOAD])
QUESTIONS = st.tuples(CALLS, st.booleans(), st.integers(0, 2**24 - 1), st.integers(0, 2**31 - 1))


@given(st.lists(QUESTIONS, min_size=1, max_size=4))
def test_the_maxima_of_questions_are_the_answer(asked: list[tuple[int, bool, int, int]]) -> None:
    """Who is in which call and holds which word is told from both ends; verdict and vote where all are in one call."""
    questions = [_ballots.question(*one) for one in asked]
    assert all(-(2**31) <= number < 2**31 for numbers in questions for number in numbers)
    answer = _ballots.answer([max(column) for column in zip(*questions, strict=True)])
    calls, overflows, votes, words = zip(*asked, strict=True)
    assert answer.calls == (min(calls), max(calls))
    assert answer.words == (min(words), max(words))
    if len(set(calls)) == 1:
        assert (answer.overflow, answer.vote) == (any(overflows), max(votes))


@given(SCALES, st.floats(allow_nan=False), st.floats(0.0))
def test_clips_are_told_apart(scale: float, order: float, max_norm: float) -> None:
    """Another scale, order or bound is another number of 31 bits; the same are the same."""
    told = _ballots.of_clip(scale, order, max_norm)
    assert 0 <= told < 2**31
    assert told == _ballots.of_clip(scale, order, max_norm)
    others = [(scale * 1.5, order, max_norm), (scale, order + 1.0, max_norm), (scale, order, max_norm + 1.0)]
    for other in others:
        assert (told == _ballots.of_clip(*other)) == (other == (scale, order, max_norm))


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
