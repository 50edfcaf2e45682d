"""What a rank writes into a message before its host has read it, against arithmetic on paper."""

import math
import struct

import pytest
import torch
from reads import watched

from lucid.amp import _norms
from lucid.amp._unread import Unread, as_one


def written(unread: Unread, first: int = 8) -> tuple[int, float]:
    """The first number of a message, and the float64 at its end."""
    numbers = torch.tensor([first, 7, 0, 0], dtype=torch.int32)
    with watched() as reads:
        unread.write(numbers)
    assert reads.count == 0
    flags, word, *norm = numbers.tolist()
    assert word == 7
    return flags, struct.unpack("=d", struct.pack("=2i", *norm))[0]


@pytest.mark.parametrize(
    ("powers", "order", "scale", "norm"),
    [
        ([9.0, 16.0], 2.0, 4.0, 1.25),
        ([1.0, 7.0], 3.0, 0.5, 4.0),
        ([3.0, 5.0], 1.0, 2.0, 4.0),
        ([3.0, 5.0], math.inf, 2.0, 2.5),
        ([math.inf, 1.0], 2.0, 2.0, math.inf),
        ([], 2.0, 2.0, 0.0),
    ],
)
def test_the_norm_of_all_powers_over_the_scale(powers: list[float], order: float, scale: float, norm: float) -> None:
    """(9 + 16)^½ / 4; for the largest magnitude no sum; of nothing, what was there stays."""
    tensors = [torch.tensor(power) for power in powers]
    assert written(Unread([], tensors, order, scale)) == (8, pytest.approx(norm))


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_nan_is_a_nan(order: float) -> None:
    """Also beside a larger number."""
    _, norm = written(Unread([], [torch.tensor(5.0), torch.tensor(math.nan)], order))
    assert math.isnan(norm)


def test_a_float64_beyond_float32_is_told_exactly() -> None:
    """Powers of two dtypes are added in float64."""
    powers = [torch.tensor(2.0**120), torch.tensor(2.0**400, dtype=torch.float64)]
    assert written(Unread([], powers)) == (8, 2.0**200)


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ([torch.tensor(False)], 8),
        ([torch.tensor(False), torch.tensor(True)], 9),
        ([torch.tensor(0.0), torch.tensor(3.0)], 9),
        ([torch.tensor(0.0)], 8),
        ([], 8),
    ],
)
def test_a_doubt_is_the_lowest_bit(flags: list[torch.Tensor], first: int) -> None:
    """Whether a flag is a bool or a float above zero; the other bits stay."""
    assert written(Unread(flags)) == (first, 0.0)


def test_a_bit_that_is_set_stays_set() -> None:
    """A doubt that the host knows of is not taken back by flags."""
    assert written(Unread([torch.tensor(True)]), first=9)[0] == 9
    assert written(Unread([torch.tensor(False)]), first=9)[0] == 9


def message(flags: int, word: int, norm: float) -> list[int]:
    """Four numbers of 32 bits."""
    return [flags, word, *struct.unpack("=2i", struct.pack("=d", norm))]


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, math.inf, -1.0, -math.inf])
@pytest.mark.parametrize(
    "norms",
    [[3.0, 4.0], [3e200, 4e200], [0.0, 4.0], [0.0, 0.0], [math.inf, 4.0], [math.inf, math.inf], [math.nan, 4.0]],
)
def test_one_message_has_the_norm_of_all(norms: list[float], order: float) -> None:
    """As the host would have combined them, beyond float64's squares too."""
    one = as_one(torch.tensor([message(0, 7, norm) for norm in norms], dtype=torch.int32), order)
    (norm,) = struct.unpack("=d", struct.pack("=2i", *one.tolist()[2:]))
    assert norm == pytest.approx(_norms.combined(norms, order), nan_ok=True)


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([(4, 7), (8, 7)], 12),
        ([(1, 7), (4, 7), (0, 7)], 5),
        ([(4, 7), (4, 8)], 6),
        ([(1024, 7), (2, 7)], 1026),
    ],
)
def test_one_message_has_the_bits_of_all(rows: list[tuple[int, int]], first: int) -> None:
    """4 or 8 is 12; words that differ are bit 1."""
    one = as_one(torch.tensor([message(flags, word, 1.0) for flags, word in rows], dtype=torch.int32), 2.0)
    assert one.tolist()[:2] == [first, 7]


def test_a_message_is_made_on_a_device_with_float64_and_else_on_the_host() -> None:
    """The meta device stands for one; what lies on the host is moved there, not the other way round."""
    on_host, elsewhere = torch.tensor(1.0), torch.ones((), device="meta")
    assert Unread([on_host], [elsewhere]).device.type == "meta"
    assert Unread([on_host], [on_host]).device.type == "cpu"
    assert Unread([]).device.type == "cpu"
