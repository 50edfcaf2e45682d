"""Which tensors are the same memory, and which overlap, against a count of every byte."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lucid.amp import _memory


def touched(tensor: Tensor) -> list[int]:
    """The address of every byte of every element, counted out one by one."""
    places = itertools.product(*map(range, tensor.shape))
    firsts = [
        tensor.data_ptr()
        + tensor.element_size() * sum(i * stride for i, stride in zip(place, tensor.stride(), strict=True))
        for place in places
    ]
    return [first + byte for first in firsts for byte in range(tensor.element_size())]


BUFFER = torch.zeros(64)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Any strided view of a small buffer, of any of two element sizes."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    strides = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
    buffer = BUFFER if draw(st.booleans()) else BUFFER.view(torch.bfloat16)
    return buffer.as_strided(shape, strides, draw(st.integers(0, 8)))


@given(views())
def test_an_element_stored_twice_is_found(tensor: Tensor) -> None:
    """A tensor overlaps itself exactly where a byte belongs to two of its elements."""
    bytes_of_it = touched(tensor)
    assert _memory.overlaps_itself(_memory.region(tensor)) == (len(bytes_of_it) > len(set(bytes_of_it)))


@given(views(), views())
def test_two_overlap_where_they_share_a_byte(a: Tensor, b: Tensor) -> None:
    """Two tensors overlap exactly where they share a byte and are not the same memory."""
    first, second = _memory.region(a), _memory.region(b)
    found = _memory.first_overlap([first, second])
    assert (found is not None) == (first != second and bool(set(touched(a)) & set(touched(b))))


@given(views(), views())
def test_the_same_region_is_the_same_memory(a: Tensor, b: Tensor) -> None:
    """Equal regions hold exactly the same bytes; equal address, shape and strides are an equal region."""
    if _memory.region(a) == _memory.region(b):
        assert set(touched(a)) == set(touched(b))
    assert _memory.region(a) == _memory.region(a.as_strided(a.shape, a.stride()))


@given(st.lists(views(), max_size=5))
def test_an_overlap_among_many_is_found(tensors: list[Tensor]) -> None:
    """Of many regions, two that share bytes are found wherever two do."""
    regions = set(map(_memory.region, tensors))
    expected = any(
        _memory.region(a) != _memory.region(b) and set(touched(a)) & set(touched(b))
        for a, b in itertools.combinations(tensors, 2)
    )
    found = _memory.first_overlap(regions)
    assert (found is not None) == expected
    if found is not None:
        assert found[0] != found[1]
        assert set(found) <= regions


def test_neighbours_and_interleaved_views_do_not_overlap() -> None:
    """Slices of a bucket that touch, and columns of one matrix, share no element."""
    flat, matrix = torch.zeros(10), torch.zeros(4, 6)
    for parts in ([flat[:4], flat[4:7], flat[7:]], [flat[0::2], flat[1::2]], [matrix[:, :3], matrix[:, 3:]]):
        assert _memory.first_overlap(map(_memory.region, parts)) is None


def test_many_interleaved_views_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns of a matrix meet each other; what is looked at grows with them, and not with their pairs."""
    looks, share_bytes = [], _memory._share_bytes
    monkeypatch.setattr(_memory, "_share_bytes", lambda *places: looks.append(places) or share_bytes(*places))
    first, second = torch.zeros(4, 50), torch.zeros(4, 50)
    places = [_memory.region(matrix[:, column]) for matrix in (first, second) for column in range(50)]
    assert _memory.first_overlap(places) is None
    assert 1 <= len(looks) <= 2


def test_a_transposed_view_is_the_same_memory() -> None:
    """It fills the same bytes without gaps, so that dividing both would divide twice."""
    matrix = torch.zeros(3, 4)
    assert _memory.region(matrix) == _memory.region(matrix.T) == _memory.region(matrix.view(-1))


def are_apart(tensors: list[Tensor]) -> bool:
    """What the quick look says of contiguous tensors."""
    begins = [tensor.data_ptr() for tensor in tensors]
    return _memory.are_apart((begins, [begin + tensor.nbytes for begin, tensor in zip(begins, tensors, strict=True)]))


@given(st.lists(views().filter(lambda view: view.is_contiguous() and view.numel() > 0), max_size=4))
def test_apart_are_those_that_share_no_byte(tensors: list[Tensor]) -> None:
    """Spans are apart exactly where no two of them share a byte."""
    shared = any(set(touched(a)) & set(touched(b)) for a, b in itertools.combinations(tensors, 2))
    assert are_apart(tensors) is not shared


def test_ordinary_tensors_are_apart() -> None:
    """Neighbours in one buffer too; a tensor twice and an overlap are not."""
    a, b = torch.zeros(3), torch.zeros(2, 2)
    assert are_apart([a, b, BUFFER[:4], BUFFER[4:6]])
    assert not are_apart([a, a])
    assert not are_apart([BUFFER[:4], BUFFER[3:6]])
    assert not are_apart([BUFFER[3:6], a, BUFFER[5:]])


GAPLESS: dict[str, Tensor] = {
    "contiguous": torch.zeros(2, 3),
    "transposed": torch.zeros(2, 3).T,
    "permuted": torch.zeros(2, 3, 4).permute(1, 2, 0),
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, volumes": torch.zeros(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "a column of one": torch.zeros(3, 1)[:, 0],
}
WITH_GAPS: dict[str, Tensor] = {
    "a column of two": torch.zeros(3, 2)[:, 0],
    "rows with a gap": torch.zeros(4, 5)[:, :3],
    "expanded": torch.zeros(1, 3).expand(4, 3),
    "overlapping itself": torch.zeros(8).as_strided((3, 3), (2, 1)),
}


@pytest.mark.parametrize("layout", [*GAPLESS, *WITH_GAPS])
def test_gapless_is_each_byte_of_the_span_once(layout: str) -> None:
    """Any order of the dimensions will do; a gap, or an element stored for several, will not."""
    tensor = (GAPLESS | WITH_GAPS)[layout]
    assert _memory.is_gapless(tensor) is (layout in GAPLESS)


def test_stored_leaves_out_what_an_expansion_repeats(device: torch.device) -> None:
    """An expanded tensor is seen once where it is stored; any other tensor is handed back."""
    small = torch.tensor([[1.0], [2.0]], device=device)
    view = _memory.stored(small.expand(3, 2, 4))
    assert (view.numel(), view.data_ptr()) == (2, small.data_ptr())
    assert _memory.stored(small) is small


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_stored_invents_no_element(shape: tuple[int, ...]) -> None:
    """An empty expansion stays empty."""
    empty = torch.zeros(1).as_strided(shape, (0,) * len(shape))
    assert _memory.stored(empty).numel() == 0


def test_a_default_device_changes_nothing() -> None:
    """Under ``torch.device("meta")`` the sums over addresses are still made where they can be read."""
    tensor = torch.zeros(9).as_strided((3, 3), (2, 2))
    with torch.device("meta"):
        assert _memory.overlaps_itself(_memory.region(tensor))
        assert _memory.first_overlap([_memory.region(tensor), _memory.region(tensor[1:])]) is not None
