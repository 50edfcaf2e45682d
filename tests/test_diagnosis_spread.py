"""How magnitudes are spread over the powers of two, and what float16 makes of them.

Expected values are on paper, or from a rounding to float16 by PyTorch, which the code does not use.
"""

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reads import waits
from torch import Tensor

from lucid.amp.diagnosis._spread import Fate, Measure, Spread


def measured(*values: float, factor: float = 1.0) -> Spread:
    """The spread of these float32 values."""
    return Measure(torch.tensor(values), factor).read()


def rounded(values: Tensor, shift: int) -> Fate:
    """The fate of float64 values, by rounding each to float16."""
    scaled = values * 2.0**shift
    half, alive = scaled.to(torch.float16), values != 0
    counts = (
        values == 0,
        alive & (half == 0),
        alive & (half != 0) & (scaled.abs() < 2.0**-14),
        torch.isinf(half),
    )
    return Fate(*(100.0 * count.sum().item() / values.numel() for count in counts))


def test_counts_of_a_handful(device: torch.device) -> None:
    """Zeros, inf, NaN, the largest and the median of what is finite and not zero, and one bin a power of two."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0, 8.0, math.inf, -math.inf, math.nan], device=device)
    spread = Measure(values).read()
    assert (spread.elements, spread.zero, spread.inf, spread.nan) == (9, 2, 2, 1)
    assert (spread.largest, spread.median) == (8.0, 1.5)
    assert {exponent: sum(kinds) for exponent, kinds in spread.bins.items()} == {0: 2, 1: 1, 3: 1}


@pytest.mark.parametrize(
    ("value", "fate"),
    [
        (0.0, Fate(100.0, 0.0, 0.0, 0.0)),
        (2.0**-25, Fate(0.0, 100.0, 0.0, 0.0)),  # ties to zero, which is even
        (2.0**-25 * 1.0001, Fate(0.0, 0.0, 100.0, 0.0)),  # rounds up to 2⁻²⁴
        (2.0**-24, Fate(0.0, 0.0, 100.0, 0.0)),
        (2.0**-14, Fate(0.0, 0.0, 0.0, 0.0)),
        (2.0**-14 * 0.9, Fate(0.0, 0.0, 100.0, 0.0)),
        (65504.0, Fate(0.0, 0.0, 0.0, 0.0)),
        (65519.996, Fate(0.0, 0.0, 0.0, 0.0)),  # rounds down to 65504
        (65520.0, Fate(0.0, 0.0, 0.0, 100.0)),
        (-1e38, Fate(0.0, 0.0, 0.0, 100.0)),
    ],
)
def test_the_edges_of_float16(value: float, fate: Fate) -> None:
    """Each value has the fate that rounding to nearest even gives it."""
    assert measured(value).fate() == fate
    assert rounded(torch.tensor([value], dtype=torch.float64), 0) == fate


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=1),
    st.integers(-40, 40),
)
def test_every_fate_is_that_of_rounding(values: list[float], shift: int) -> None:
    """For any float32 values at any power-of-two scale, the percentages are those of rounding each to float16."""
    tensor = torch.tensor(values, dtype=torch.float64)
    assert Measure(tensor.float()).read().fate(shift) == pytest.approx(rounded(tensor, shift))


@given(st.lists(st.floats(min_value=2.0**-60, max_value=2.0**60, width=32), min_size=1), st.sampled_from([3.0, 0.1]))
def test_a_factor_multiplies(values: list[float], factor: float) -> None:
    """A factor that is no power of two gives the spread of the products."""
    products = [value * factor for value in values]
    spread = measured(*values, factor=factor)
    assert spread.largest == pytest.approx(max(products), rel=1e-6)
    assert spread.median == pytest.approx(sorted(products)[(len(products) - 1) // 2], rel=1e-6)


def test_a_power_of_two_moves_the_bins() -> None:
    """At a factor of 2¹⁶ every bin lies 16 further right, and nothing overflows in between."""
    spread = measured(1.0, 3e38, 2.0**-140, factor=2.0**16)
    assert list(spread.bins) == [-111, 16, 143]  # float32's subnormals share their lowest bin, at 2⁻¹²⁷
    assert spread.largest == pytest.approx(3e38 * 2.0**16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """What a dtype holds exactly is measured as it is."""
    spread = Measure(torch.tensor([0.5, -4.0, 0.0], dtype=dtype)).read()
    assert (spread.largest, spread.median, spread.zero) == (4.0, 0.5, 1)


def test_float64_beyond_float32_stays_finite_and_not_zero() -> None:
    """A float64 outside float32's range is counted at its end, neither as inf nor as zero."""
    spread = Measure(torch.tensor([1e300, 1e-300], dtype=torch.float64)).read()
    assert (spread.inf, spread.zero) == (0, 0)
    assert spread.fate() == Fate(0.0, 50.0, 0.0, 50.0)


def test_the_median_of_many_is_as_fine_as_float16() -> None:
    """Above the size that is sorted, the median is told within 2⁻¹¹."""
    values = torch.rand(100_001, generator=torch.Generator().manual_seed(0)) + 0.01
    assert Measure(values).read().median == pytest.approx(values.median().item(), rel=2.0**-11)


def test_the_median_of_many_zeros() -> None:
    """Zeros are left out of the median, in a tensor of any size."""
    values = torch.zeros(100_000)
    assert Measure(values).read().median == 0.0
    values[:3] = torch.tensor([1.0, 2.0, 4.0])
    assert Measure(values).read().median == pytest.approx(2.0, rel=2.0**-11)


def test_an_empty_tensor() -> None:
    """Nothing is in it."""
    spread = Measure(torch.zeros(0)).read()
    assert (spread.elements, spread.largest, spread.unused_bits, spread.fate()) == (0, 0.0, None, Fate(0, 0, 0, 0))


def test_only_what_is_not_finite() -> None:
    """Without a finite value there is no largest, no median, and no bits to speak of."""
    spread = measured(math.inf, math.nan)
    assert (spread.largest, spread.median, spread.bins, spread.unused_bits) == (0.0, 0.0, {}, None)


def test_unused_bits() -> None:
    """So many times the largest can be doubled before it passes 65504."""
    assert measured(65504.0 / 8).unused_bits == pytest.approx(3.0)
    assert measured(65504.0 * 4).unused_bits == pytest.approx(-2.0)


def test_shares_add_up() -> None:
    """The histogram's percentages, with the zeros, are 100."""
    spread = measured(0.0, 1.0, 1.0, 4.0)
    assert spread.shares() == {0: 50.0, 2: 25.0} and spread.percent(spread.zero) == 25.0


def test_the_tensor_is_not_changed() -> None:
    """Measuring copies, also where nothing needs converting."""
    values = torch.tensor([-1.0, 2.0])
    Measure(values, 3.0).read()
    assert values.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("size", [5, 1000, 40000])
def test_a_device_is_measured_without_waiting_for_it(device: torch.device, size: int) -> None:
    """As on the CPU, below and above the size at which the median is sorted; only ``read`` waits."""
    if device.type == "cpu":
        pytest.skip("the CPU is what a device is compared with")
    values = torch.randn(size) * torch.tensor([1e-9, 1e-6, 1.0, 1e6, math.inf])[torch.arange(size) % 5]
    there = values.to(device)
    with waits(0) if device.type == "cuda" else contextlib.nullcontext():
        measure = Measure(there, 3.0)
    assert measure.read() == Measure(values, 3.0).read()
