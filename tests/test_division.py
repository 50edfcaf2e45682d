"""Division by the scale, every dtype of the table against NumPy, bit for bit.

On a CPU and on CUDA each quotient is the correctly rounded one. Other devices divide as they can: there powers of
two are exact for normal numbers, and other scales are within a unit or two of the last place.
"""

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from values import INTEGERS, WITHOUT_FLOAT64, bits, numbers, same

from lucid.amp._division import DIVIDES_IN, Divisor
from lucid.amp._reading import Reading
from lucid.amp._torch import by_device_and_dtype

CORRECTLY_ROUNDED = {"cpu", "cuda"}

# Not powers of two: 3 as it is, 0.1 and 1000.1 as the nearest float32.
ODD = [3.0, 0.1, 1000.1]
POWERS = [2.0**exponent for exponent in (-126, -24, -2, -1, 0, 1, 15, 16, 126, 127)]


def expected(values: np.ndarray, dtype: str, scale: float) -> np.ndarray:
    """The quotient, rounded once in the dtype of the division and once into the gradient's."""
    return reference.stored(reference.quotient(values, dtype, scale), dtype)


def divisor(scale: float) -> Divisor:
    """A divisor by a scale as the scaler holds it."""
    return Divisor(reference.float32(scale))


def assert_divided(found: np.ndarray, values: np.ndarray, dtype: str, scale: float, device: torch.device) -> None:
    """Compare with NumPy as strictly as the device allows."""
    wanted = expected(values, dtype, scale)
    if device.type in CORRECTLY_ROUNDED:
        assert same(found, wanted)
    else:
        normal = np.abs(values) >= 2.0**-126
        normal &= ~np.isfinite(wanted) | (np.abs(wanted) >= 2.0**-126)
        units = 2.0 ** -(7 if dtype == "bfloat16" else 22)
        exact = math.frexp(scale)[0] == 0.5
        np.testing.assert_allclose(found[normal], wanted[normal], rtol=0 if exact else units)


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("scale", ODD + POWERS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_each_row_of_the_table(dtype: str, scale: float, device: torch.device) -> None:
    """float32 and float64 hold the quotient rounded once in their own dtype, bfloat16 the float32 quotient rounded."""
    if dtype == "float64" and device.type in WITHOUT_FLOAT64:
        pytest.skip(f"{device.type} has no float64")
    gradient = bits(dtype).to(device)
    values = numbers(gradient).copy()
    divisor(scale).divide_(by_device_and_dtype([gradient]))
    assert gradient.dtype is getattr(torch, dtype)
    assert_divided(numbers(gradient), values, dtype, reference.float32(scale), device)


@pytest.mark.parametrize("scale", ODD + POWERS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_without_a_verdict_the_quotients_are_the_same(dtype: str, scale: float) -> None:
    """Where the verdict is known, the division itself is no other."""
    gradient = bits(dtype, seed=1)
    values = numbers(gradient).copy()
    divisor(scale).divide_(by_device_and_dtype([gradient]), judged=False)
    assert same(numbers(gradient), expected(values, dtype, reference.float32(scale)))


def test_the_table_holds_the_three_dtypes_of_the_contract() -> None:
    """float16 and complex are not divided at all; bfloat16 is divided in float32."""
    rows = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    assert rows == DIVIDES_IN


def test_one_third_in_float64() -> None:
    """1.0 over 3 keeps float64's digits: a float32 reciprocal would leave 0.33333334."""
    gradient = torch.ones(1, dtype=torch.float64)
    divisor(3.0).divide_(by_device_and_dtype([gradient]))
    assert gradient.item() == 0.3333333333333333


def test_a_bfloat16_is_rounded_once() -> None:
    """257/256 over 3: the float32 quotient lies just off a tie of bfloat16, which a bfloat16 division loses."""
    values = torch.arange(128, 256).to(torch.bfloat16)
    gradient = values.clone()
    divisor(3.0).divide_(by_device_and_dtype([gradient]))
    wanted = reference.bfloat16((values.float() / 3.0).numpy())
    assert same(numbers(gradient), wanted)


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**126, 2.0**127, 3.0])
def test_subnormals_are_kept(scale: float, device: torch.device) -> None:
    """A quotient below 2⁻¹²⁶ is rounded to a subnormal and not flushed to zero."""
    if device.type not in CORRECTLY_ROUNDED:
        pytest.skip("only a CPU and CUDA promise subnormals")
    values = np.array([2.0**-126, 3 * 2.0**-127, 2.0**-149, 2.0**-110, 2.0**-20, -(2.0**-21)], dtype=np.float32)
    gradient = torch.from_numpy(values.copy()).to(device)
    divisor(scale).divide_(by_device_and_dtype([gradient]))
    assert same(numbers(gradient), expected(values, "float32", scale))


def test_the_bounds_of_the_scale_keep_a_good_gradient() -> None:
    """At 2⁻¹²⁶ and 2¹²⁷ the division makes no 0, inf or NaN of a gradient that is 3 once it is unscaled."""
    for scale in (2.0**-126, 2.0**126):
        gradient = torch.full((3,), 3.0 * scale)
        by = divisor(scale)
        verdict = by.divide_(by_device_and_dtype([gradient]))
        assert gradient.tolist() == [3.0] * 3
        assert not by.read(verdict)
    gradient = torch.full((3,), 1.5 * 2.0**127)
    by = divisor(2.0**127)
    assert not by.read(by.divide_(by_device_and_dtype([gradient])))
    assert gradient.tolist() == [1.5] * 3


@given(
    st.sampled_from(sorted(INTEGERS)),
    st.floats(2.0**-126, 2.0**127),
    st.integers(0, 2**32),
    st.integers(1, 40),
)
def test_any_scale_divides_and_judges_as_numpy(dtype: str, scale: float, seed: int, count: int) -> None:
    """For any scale within the bounds quotients and verdict are NumPy's."""
    scale = reference.float32(scale)
    gradient = bits(dtype, count, seed)
    values = numbers(gradient).copy()
    overflow = not np.isfinite(reference.quotient(values, dtype, scale)).all()
    by, buckets = divisor(scale), by_device_and_dtype([gradient])
    assert by.read(by.judge_quotients(buckets)) == overflow
    assert Reading([[gradient]]).overflows(by) == overflow
    assert same(numbers(gradient), values)
    assert by.read(by.divide_(buckets)) == overflow
    assert same(numbers(gradient), expected(values, dtype, scale))


def test_a_scale_that_moves_divides_by_the_new_one(device: torch.device) -> None:
    """The factors on the device are refreshed, those of the reciprocal and of every dtype too."""
    by = divisor(3.0)
    for scale in (3.0, 4.0, 0.1, 65536.0):
        by.set(reference.float32(scale))
        for dtype in (torch.float32, torch.bfloat16):
            gradient = torch.full((3,), 6.0, dtype=dtype, device=device)
            by.divide_(by_device_and_dtype([gradient]))
            name = str(dtype).removeprefix("torch.")
            values = np.full(3, 6.0, np.float32)
            assert_divided(numbers(gradient), values, name, reference.float32(scale), device)


def test_many_tensors_of_many_dtypes_are_divided_at_once(device: torch.device) -> None:
    """Mixed dtypes, shapes and strides in one call: each gets its own quotient, and one verdict speaks for all."""
    tensors: list[Tensor] = [
        torch.full((), 6.0),
        torch.full((2, 3), 6.0, dtype=torch.bfloat16),
        torch.full((4, 4), 6.0).T[::2],
        torch.full((65, 2), 6.0)[:, 1],
    ]
    tensors = [tensor.to(device) for tensor in tensors]
    by, buckets = divisor(3.0), by_device_and_dtype(tensors)
    assert not by.read(by.divide_(buckets))
    assert all(bool((tensor == 2.0).all()) for tensor in tensors)
    tensors[3][64] = math.nan
    assert by.read(by.divide_(buckets))


@pytest.mark.parametrize("scale", [3.0, 4.0])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_a_default_dtype_changes_nothing(default: torch.dtype, scale: float) -> None:
    """What a user set as default dtype, or default device, has no part in the division."""
    gradient = torch.full((3,), 12.0)
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            by = divisor(scale)
            assert not by.read(by.divide_(by_device_and_dtype([gradient])))
    finally:
        torch.set_default_dtype(torch.float32)
    assert gradient.tolist() == [12.0 / scale] * 3
