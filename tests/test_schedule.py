"""How the scale moves, against arithmetic on paper."""

import dataclasses
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid.amp import GradScaler, ScaleUpdate, _schedule
from lucid.amp._schedule import Schedule

STATE = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1}


def followed(schedule: Schedule, scale: float, overflows: str) -> list[float]:
    """The scale after each update; an ``x`` is an overflow."""
    scales, count = [], 0
    for letter in overflows:
        scale, count = schedule.next(scale, count, letter == "x")
        scales.append(scale)
    return scales


def test_the_sawtooth() -> None:
    """From 4, growing by 2 after two good updates and halving after an overflow, as worked out on paper."""
    schedule = Schedule(2.0, 0.5, 2)
    assert followed(schedule, 4.0, "..x...x.x..") == [4, 8, 4, 4, 8, 8, 4, 4, 2, 2, 4]


def test_an_overflow_restarts_the_count() -> None:
    """The good updates must be consecutive: one before an overflow does not count after it."""
    assert Schedule(2.0, 0.5, 3).next(4.0, 2, overflow=True) == (2.0, 0)
    assert followed(Schedule(2.0, 0.5, 3), 4.0, "..x..") == [4, 4, 2, 2, 2]


def test_growth_restarts_the_count() -> None:
    """After growth a whole interval passes before the next one."""
    assert Schedule(2.0, 0.5, 3).next(4.0, 2, overflow=False) == (8.0, 0)


def test_the_default_interval_is_counted_to_the_update() -> None:
    """With an interval of 2000 the scale grows at the 2000th good update and not at the 1999th."""
    scales = followed(Schedule(2.0, 0.5, 2000), 65536.0, "." * 2000)
    assert scales[1998:] == [65536.0, 131072.0]


def test_an_interval_of_one_grows_every_time() -> None:
    """The smallest interval means growth at each good update."""
    assert followed(Schedule(2.0, 0.5, 1), 1.0, "...") == [2, 4, 8]


def test_a_count_beyond_the_interval_is_enough() -> None:
    """A count that an interval shortened later finds too high grows at once."""
    assert Schedule(2.0, 0.5, 3).next(4.0, 7, overflow=False) == (8.0, 0)


def test_every_scale_is_rounded_once_to_float32() -> None:
    """65536 · 1.1 = 72089.6, whose nearest float32 is 72089.6015625 (spacing 2⁻⁷)."""
    assert followed(Schedule(1.1, 0.5, 1), 65536.0, ".") == [72089.6015625]


def test_the_scale_stops_at_the_smallest_normal_float32() -> None:
    """Backoff at 2⁻¹²⁶ stays there, and what would jump below it lands on it."""
    assert followed(Schedule(2.0, 0.5, 9), 2.0**-125, "xxx") == [2.0**-126] * 3
    assert followed(Schedule(2.0, 1e-30, 9), 2.0**-60, "x") == [2.0**-126]


def test_the_scale_stops_at_the_largest_power_of_two() -> None:
    """Growth at 2¹²⁷ stays there, what would jump above it lands on it, and the count restarts."""
    assert followed(Schedule(2.0, 0.5, 1), 2.0**126, "...") == [2.0**127] * 3
    assert followed(Schedule(1e300, 0.5, 1), 2.0**127, ".") == [2.0**127]
    assert Schedule(2.0, 0.5, 5).next(2.0**127, 4, overflow=False) == (2.0**127, 0)


@given(
    st.floats(2.0**-126, 2.0**127),
    st.floats(1, 1e308, exclude_min=True),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
    st.text(".x", max_size=40),
)
def test_any_scale_reached_is_a_float32_within_the_bounds(
    scale: float, growth: float, backoff: float, overflows: str
) -> None:
    """Whatever the factors and the overflows, the scale is a normal float32 that can be divided by."""
    for reached in followed(Schedule(growth, backoff, 1), _schedule.scale("init_scale", scale), overflows):
        assert 2.0**-126 <= reached <= 2.0**127
        assert float(np.float32(reached)) == reached


HUGE = 10**400  # beyond any float
NOT_FINITE = [math.nan, math.inf, -math.inf, HUGE]
NO_NUMBER = ["8", None, True, False, 1j, np.True_, Decimal(8), [2.0]]
OUT_OF_RANGE: dict[str, list[Any]] = {
    "init_scale": [0, -4.0, 2.0**-127, 2.0**127 * (1 + 2.0**-23), *NOT_FINITE],
    "growth_factor": [1, 0.5, -2.0, *NOT_FINITE],
    "backoff_factor": [0, 1, 1.5, -0.5, *NOT_FINITE],
    "growth_interval": [0, -1],
}
WRONG_TYPE: dict[str, list[Any]] = {**dict.fromkeys(OUT_OF_RANGE, NO_NUMBER), "growth_interval": [*NO_NUMBER, 2.0]}


def refusals() -> Iterator[tuple[str, Any, type[Exception]]]:
    """Each parameter with each value that it refuses, and how."""
    for cases, error in ((OUT_OF_RANGE, ValueError), (WRONG_TYPE, TypeError)):
        for name, values in cases.items():
            yield from ((name, value, error) for value in values)


@pytest.mark.parametrize(("name", "value", "error"), list(refusals()), ids=str)
def test_a_bad_number_is_refused_by_name_and_value(name: str, value: Any, error: type[Exception]) -> None:
    """Out of range is a ValueError, a wrong type a TypeError; the message holds the parameter and the value."""
    with pytest.raises(error) as raised:
        GradScaler(**{name: value})
    assert name in str(raised.value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("number", [np.float32(4), np.float64(4), np.int64(4), 4, Fraction(4), np.float16(4)], ids=repr)
def test_any_real_number_is_a_scale(number: Any) -> None:
    """NumPy's scalars, fractions and ints pass, and become a Python float."""
    scale = _schedule.scale("init_scale", number)
    assert (scale, type(scale)) == (4.0, float)


def test_numpy_scalars_are_settings() -> None:
    """NumPy's scalars pass as factors and interval, and are kept as Python's own numbers."""
    schedule = Schedule(np.float32(2), np.float64(0.5), np.int32(3))  # type: ignore[arg-type]
    assert schedule == Schedule(2.0, 0.5, 3)
    assert [type(value) for value in dataclasses.astuple(schedule)] == [float, float, int]


def test_a_scale_is_rounded_where_it_is_given() -> None:
    """0.1 is not a float32; the nearest is 13421773 · 2⁻²⁷."""
    assert _schedule.scale("init_scale", 0.1) == 13421773 * 2.0**-27


def test_the_bounds_themselves_are_scales() -> None:
    """2⁻¹²⁶ and 2¹²⁷ are the last that are accepted."""
    assert _schedule.scale("new_scale", 2.0**-126) == 2.0**-126
    assert _schedule.scale("new_scale", 2.0**127) == 2.0**127


def test_a_state_is_loaded_as_it_was_saved() -> None:
    """Settings, scale and count come back, also through JSON."""
    schedule, scale, count = _schedule.loaded(json.loads(json.dumps(STATE)))
    assert schedule.state_dict(scale, count) == STATE
    assert (schedule, scale, count) == (Schedule(2.0, 0.5, 3), 8.0, 1)


def test_whole_floats_are_counts() -> None:
    """JSON of other languages writes 2000.0: it is an interval, and kept as an int."""
    schedule, _, count = _schedule.loaded({**STATE, "growth_interval": 2000.0, "_growth_tracker": 5.0})
    assert (schedule.growth_interval, count) == (2000, 5)
    assert (type(schedule.growth_interval), type(count)) == (int, int)


def test_the_count_may_be_called_growth_tracker() -> None:
    """The key without an underscore is read too, and both at once is refused."""
    state = {key.lstrip("_"): value for key, value in STATE.items()}
    assert _schedule.loaded(state)[1:] == (8.0, 1)
    with pytest.raises(ValueError, match="both 'growth_tracker' and '_growth_tracker'"):
        _schedule.loaded({**STATE, "growth_tracker": 1})


@pytest.mark.parametrize("key", STATE)
def test_a_missing_key_is_refused_by_name(key: str) -> None:
    """A state dict without one of the five is refused with that name."""
    with pytest.raises(ValueError, match=rf"misses '{key}'\."):
        _schedule.loaded({name: value for name, value in STATE.items() if name != key})


def test_an_unknown_key_is_refused_by_name() -> None:
    """A key that no scaler saves is refused with its name."""
    with pytest.raises(ValueError, match=r"unknown.*'dynamic'"):
        _schedule.loaded({**STATE, "dynamic": True})


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        *[("scale", value, ValueError) for value in (0, -4.0, math.nan, math.inf, 1e-40)],
        *[("scale", value, TypeError) for value in ("8", None, True)],
        ("growth_factor", 1.0, ValueError),
        ("backoff_factor", 1.0, ValueError),
        ("growth_interval", 0, ValueError),
        ("growth_interval", 2000.5, TypeError),
        ("growth_interval", math.inf, TypeError),
        ("_growth_tracker", -1, ValueError),
        ("_growth_tracker", "1", TypeError),
        ("_growth_tracker", False, TypeError),
    ],
)
def test_a_bad_value_is_not_loaded(key: str, value: Any, error: type[Exception]) -> None:
    """A state dict is held to what the constructor accepts, and the message names the value."""
    with pytest.raises(error, match=key.lstrip("_")) as raised:
        _schedule.loaded({**STATE, key: value})
    assert repr(value) in str(raised.value)


def test_an_empty_state_says_where_it_comes_from() -> None:
    """PyTorch's disabled scaler saves {}: the refusal says so and what to do instead."""
    with pytest.raises(RuntimeError, match=r"disabled torch\.amp\.GradScaler.*fresh scaler"):
        _schedule.loaded({})


@pytest.mark.parametrize("state", [None, [], "scale", 3])
def test_what_is_no_dict_is_not_loaded(state: Any) -> None:
    """The type that was found is told, and what would do."""
    with pytest.raises(TypeError, match=rf"dict.*{type(state).__name__}.*state_dict\(\)"):
        _schedule.loaded(state)


def test_a_whole_checkpoint_is_told_its_part() -> None:
    """Which of its entries looks like a scaler's is named."""
    with pytest.raises(ValueError, match=r"misses .*'scale'.*Pass its 'amp', which looks like a scaler's"):
        _schedule.loaded({"model": {"weight": 1.0}, "amp": STATE, "step": 3})
    with pytest.raises(ValueError, match=r"unknown keys: 'more'\. Pass its 'more', which"):
        _schedule.loaded({**STATE, "more": STATE})


def test_a_scale_update_is_frozen_and_becomes_json() -> None:
    """The record cannot be changed, and its dict holds plain values for loggers."""
    update = ScaleUpdate(3, 8.0, 4.0, True, (True, False))
    with pytest.raises(dataclasses.FrozenInstanceError):
        update.scale = 1.0  # type: ignore[misc]
    expected = {"index": 3, "scale": 8.0, "new_scale": 4.0, "overflow": True, "skipped": [True, False]}
    assert json.loads(json.dumps(update.as_dict())) == expected
