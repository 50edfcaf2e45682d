"""One read that changes nothing: whether a quotient overflows, and later whether the division happened."""

import math

import pytest
import torch

from lucid.amp._division import Divisor
from lucid.amp._reading import Reading
from lucid.amp._torch import by_device_and_dtype

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("values", "scale", "overflow"),
    [
        ([1.0, -2.0], 65536.0, False),
        ([math.inf], 65536.0, True),
        ([math.nan, 1.0], 65536.0, True),
        ([-math.inf, math.inf], 0.5, True),
        ([3e38], 0.25, True),
        ([3e38], 1.0, False),
        ([3e38] * 9, 1.0, False),
        ([LARGEST, -LARGEST], 1.0, False),
        ([LARGEST / 2], 0.5, False),
        ([LARGEST], 0.5, True),
        ([1e20] * 4, 2.0, False),
        ([0.0], 2.0**-126, False),
        ([2.0], 2.0**-126, False),
        ([4.0], 2.0**-126, True),
        ([], 1.0, False),
    ],
)
@pytest.mark.parametrize("size", [1, 3000])
def test_the_verdict_is_on_the_quotients(
    values: list[float], scale: float, overflow: bool, size: int, device: torch.device
) -> None:
    """Whether value / scale exceeds float32, as division on paper says; the tensors stay as they are."""
    tensor = torch.tensor(values * size, device=device)
    before = tensor.clone()
    reading = Reading([[torch.ones(3, device=device)], [tensor]] if values else [])
    assert reading.overflows(Divisor(scale)) is overflow
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("values", "scale", "doubtful"),
    [
        ([1.0, -2.0], 65536.0, False),
        ([1.0, -2.0], 0.5, False),
        ([1e18], 2.0**-60, False),
        ([1e18], 2.0**-80, True),
        ([math.inf], 65536.0, True),
        ([math.nan, 1.0], 65536.0, True),
        ([3e38], 65536.0, True),
        ([1e20], 1.0, True),
        ([0.0], 1.0, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_that_tells_nothing_is_a_doubt(
    values: list[float], scale: float, doubtful: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Its square is infinite or 0, or its root over the scale may be infinite: 1e18 · 2⁶⁰ is 1.2e36, · 2⁸⁰ 1.2e42."""
    reading = Reading([[torch.tensor(values, device=device, dtype=dtype)]])
    (doubt,) = reading.doubts(Divisor(scale))
    assert bool(doubt) is doubtful


def test_no_doubt_of_a_float64_that_float32_would_have() -> None:
    """1e100 · 2¹⁰⁰ is 1.3e130."""
    (doubt,) = Reading([[torch.tensor([1e100], dtype=torch.float64)]]).doubts(Divisor(2.0**-100))
    assert not bool(doubt)


def test_float64_overflows_where_float64_does() -> None:
    """1e300 / 0.5 is a float64; beside a float32 tensor too."""
    tensors = [torch.tensor([1e300], dtype=torch.float64), torch.ones(2)]
    assert not Reading([tensors]).overflows(Divisor(0.5))
    assert Reading([[torch.tensor([1e308], dtype=torch.float64)]]).overflows(Divisor(2.0**-10))


@pytest.mark.parametrize("scale", [3.0, 65536.0, 0.1, 1.01])
def test_a_group_that_was_divided_is_told_from_one_that_was_not(scale: float) -> None:
    """After the division of the second group alone, the tensors of the first are those that are left."""
    divisor = Divisor(scale)
    groups = [[torch.tensor([3.0, 4.0]) * scale, torch.ones(5)], [torch.tensor([7.0]) * scale]]
    reading = Reading(groups)
    reading.remember()
    divisor.divide_(by_device_and_dtype(groups[1]))
    ((_, _, left),) = reading.undivided(divisor)
    assert [id(tensor) for tensor in left] == [id(tensor) for tensor in groups[0]]
    divisor.divide_(by_device_and_dtype(groups[0]))
    assert reading.undivided(divisor) == []


def test_zeros_are_never_left() -> None:
    """A group of zeros holds its true values, whoever looks."""
    reading = Reading([[torch.zeros(4)]])
    reading.remember()
    assert reading.undivided(Divisor(8.0)) == []


def test_a_quotient_whose_square_vanishes_was_divided() -> None:
    """1 / 2¹⁰⁰ squared is 0 in float32: changed, so it is not divided again."""
    divisor = Divisor(2.0**100)
    group = [torch.ones(1)]
    reading = Reading([group])
    reading.remember()
    divisor.divide_(by_device_and_dtype(group))
    assert reading.undivided(divisor) == []
