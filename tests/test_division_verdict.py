"""The verdict on the quotients, the pieces in which large gradients are divided, and what is kept on devices."""

import math

import numpy as np
import pytest
import reference
import torch
from torch import Tensor
from values import INTEGERS, WITHOUT_FLOAT64, bits, numbers, same

from lucid.amp import _division
from lucid.amp._division import Divisor, Factors
from lucid.amp._torch import by_device_and_dtype


def divisor(scale: float) -> Divisor:
    """A divisor by a scale as the scaler holds it."""
    return Divisor(reference.float32(scale))


VERDICTS = [
    ("float32", 0.5, 3e38, True),  # the quotient, 6e38, is inf although the gradient is not
    ("float32", 2.0, 3e38, False),
    ("float32", 0.25, -3e38, True),
    ("float64", 0.5, 3e38, False),
    ("float64", 0.5, 1.5e308, True),
    ("float64", 65536.0, 1e39, False),  # beyond float32, through which CUDA's check-and-multiply looks
    ("float64", 3.0, -1e300, False),
    ("bfloat16", 0.5, 3e38, True),
    ("float32", 2.0**-126, 4.0, True),  # 4 · 2¹²⁶ = 2¹²⁸
    ("float32", 2.0**-126, 3.9999998, False),
    ("float32", 0.1, 3.4e37, False),
    ("float32", 0.1, 3.41e37, True),
    *[(dtype, scale, math.inf, True) for dtype in INTEGERS for scale in (65536.0, 3.0)],
    *[(dtype, scale, -math.inf, True) for dtype in INTEGERS for scale in (65536.0, 3.0)],
    *[(dtype, scale, math.nan, True) for dtype in INTEGERS for scale in (65536.0, 3.0, 0.5)],
]


@pytest.mark.parametrize(("dtype", "scale", "value", "overflow"), VERDICTS)
@pytest.mark.parametrize("place", [0, 500, 1026])
def test_one_quotient_decides(
    dtype: str, scale: float, value: float, overflow: bool, place: int, device: torch.device
) -> None:
    """The verdict is on the quotient, wherever in the tensor it stands, by all three ways to reach one."""
    if dtype == "float64" and device.type in WITHOUT_FLOAT64:
        pytest.skip(f"{device.type} has no float64")
    gradient = torch.ones(1027, dtype=getattr(torch, dtype))
    gradient[place] = value
    gradient = gradient.to(device)
    bystander = torch.ones(5, device=device)
    by = divisor(scale)
    assert by.read(by.judge_quotients(by_device_and_dtype([bystander, gradient]))) is overflow
    assert bystander.tolist() == [1.0] * 5, "judging changes nothing"
    assert by.read(by.divide_(by_device_and_dtype([bystander, gradient]))) is overflow
    assert by.read(by.judge(by_device_and_dtype([gradient]))) is overflow


def test_a_bfloat16_is_judged_before_it_is_rounded() -> None:
    """(2¹²⁸ − 2¹²⁰) / 0.997 is about 2¹²⁸ − 2¹¹⁸: finite in float32, though nearer to bfloat16's inf; no overflow."""
    largest = torch.finfo(torch.bfloat16).max
    scale = reference.float32((1 - 2.0**-8) / (1 - 2.0**-10))
    gradient = torch.full((1,), largest, dtype=torch.bfloat16)
    quotient = np.float32(largest) / np.float32(scale)
    assert np.isfinite(quotient)
    assert np.isinf(reference.bfloat16(np.array([quotient])))[0]
    by = divisor(scale)
    assert not by.read(by.divide_(by_device_and_dtype([gradient])))
    assert gradient.item() == math.inf


def test_no_tensor_overflows_nothing() -> None:
    """The verdict on nothing is that nothing overflowed."""
    by = divisor(3.0)
    assert [by.read(verdict) for verdict in (by.divide_([]), by.judge([]), by.judge_quotients([]))] == [False] * 3


@pytest.mark.parametrize("size", [1, 5, 7])
def test_pieces_are_bounded_and_make_up_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No list of views holds more elements than a piece, and together they are every element once."""
    monkeypatch.setattr(_division, "PIECE", size)
    bucket: list[Tensor] = [torch.zeros(17), torch.zeros(3, 5).T, torch.zeros(()), torch.zeros(8)[::2]]
    lists = list(_division.pieces(bucket))
    assert all(sum(piece.numel() for piece in pieces) <= size for pieces in lists)
    for piece in (piece for pieces in lists for piece in pieces):
        piece += 1
    assert all(bool((tensor == 1).all()) for tensor in bucket)


@pytest.mark.parametrize("scale", [3.0, 0.5])
def test_a_gradient_larger_than_the_workspace_is_divided_in_pieces(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces the quotients and the verdict are the same, for contiguous and other tensors."""
    monkeypatch.setattr(_division, "PIECE", 7)
    for shaped in (lambda t: t, lambda t: t.view(4, 25).T, lambda t: t[::3]):
        gradient = bits("bfloat16", 100)
        values = numbers(gradient).copy()
        view = shaped(gradient)
        divisor(scale).divide_(by_device_and_dtype([view]))
        divided = torch.zeros(100, dtype=torch.bool)
        shaped(divided)[...] = True
        quotients = reference.bfloat16(reference.quotient(values, "bfloat16", scale))
        wanted = np.where(divided.numpy(), quotients, values)
        assert same(numbers(gradient), wanted)


class TestFactors:
    """Numbers kept on devices."""

    def test_the_same_tensor_is_handed_out_and_refreshed_in_place(self, device: torch.device) -> None:
        """A captured graph holds the tensor, so that it must stay the same one."""
        factors = Factors(2.0)
        first = factors[device, torch.float32]
        assert (first.item(), first.shape, first.dtype) == (2.0, torch.Size(), torch.float32)
        factors.set(3.0)
        assert factors[device, torch.float32] is first
        assert first.item() == 3.0

    def test_each_dtype_has_its_own(self) -> None:
        """A float64 factor holds the number to float64's digits."""
        factors = Factors(1 / 3)
        assert factors[torch.device("cpu"), torch.float64].item() == 1 / 3
        assert factors[torch.device("cpu"), torch.float32].item() == reference.float32(1 / 3)

    def test_one_made_in_inference_mode_serves_training(self) -> None:
        """A validation pass that comes first leaves nothing behind that autograd refuses."""
        factors = Factors(2.0)
        with torch.inference_mode():
            factor = factors[torch.device("cpu"), torch.float32]
        factors.set(4.0)
        leaf = torch.ones(1, requires_grad=True)
        (leaf * factor).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == 4.0


@pytest.mark.parametrize("values", [[], [1.5], [1.5, -2.0], [1.5, math.inf, 0.0]])
def test_numbers_are_read_in_their_order(values: list[float], device: torch.device) -> None:
    """Values of several dtypes and devices come back as Python floats in the order in which they were given."""
    kinds = [(torch.float32, device), (torch.float32, "cpu"), (torch.bfloat16, device)]
    tensors = [torch.tensor(value, dtype=dtype).to(place) for value, (dtype, place) in zip(values, kinds, strict=False)]
    assert _division.numbers(tensors) == values


def test_numbers_keep_the_digits_of_the_widest() -> None:
    """A float64 beside a float32 is read as it is."""
    assert _division.numbers([torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.5)]) == [0.1, 0.5]


def test_a_flag_that_stayed_zero_is_lent_again() -> None:
    """The next verdict is made of the same tensor; one that told of an overflow is not used again."""
    by, good, bad = Divisor(4.0), *(by_device_and_dtype([torch.tensor([value])]) for value in (12.0, math.inf))
    lent = by.divide_(good)
    (flag,) = lent
    assert not by.read(lent)
    overflow = by.judge(bad)
    assert overflow[0] is flag
    assert by.read(overflow)
    fresh = by.judge(good)
    assert fresh[0] is not flag
    assert not by.read(fresh)
