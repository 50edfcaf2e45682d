"""Which tensors are the same memory, and which overlap, against a count of every byte."""

import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lucid.amp import _memory
from lucid.amp._memory import Seen


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


def spans(*tensors: Tensor) -> _memory.Spans:
    """Where contiguous tensors begin and end."""
    begins = [tensor.data_ptr() for tensor in tensors]
    return begins, [begin + tensor.nbytes for begin, tensor in zip(begins, tensors, strict=True)]


def are_apart(tensors: list[Tensor]) -> bool:
    """What the quick look says of contiguous tensors."""
    return _memory.are_apart(spans(*tensors))


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


def remembered(*tensors: Tensor) -> Seen:
    """What has seen these tensors."""
    seen = Seen()
    seen.add(tensors, [_memory.region(tensor) for tensor in tensors])
    return seen


def test_a_tensor_is_known_until_clear() -> None:
    """The very object, and another object of the same memory, until the iteration ends."""
    tensor, other = torch.zeros(3), torch.zeros(3)
    seen = remembered(tensor)
    assert seen.added
    assert seen.has(tensor, _memory.region(tensor))
    assert seen.has(tensor.view(3), _memory.region(tensor))
    assert not seen.has(other, _memory.region(other))
    seen.clear()
    assert not seen.added
    assert not seen.has(tensor, _memory.region(tensor))


def test_a_tensor_at_the_address_of_one_that_is_gone_is_new() -> None:
    """The allocator hands an address out again; the object decides."""
    storage = torch.zeros(3)
    place = _memory.region(storage)
    for asked_before in (False, True):
        first = storage.view(3)
        seen = remembered(first)
        assert not asked_before or seen.has(first, place)
        del first
        assert not seen.has(storage.view(3), place)
        assert seen.regions() == []


def test_a_tensor_object_at_the_address_of_one_that_is_gone_is_new() -> None:
    """Python hands the address of an object out again too."""
    seen, storages, addresses = Seen(), torch.zeros(100, 3), set()
    for storage in storages:
        tensor = storage.view(3)
        addresses.add(id(tensor))
        assert not seen.has(tensor, _memory.region(tensor))
        seen.add([tensor], [_memory.region(tensor)])
        assert seen.has(tensor, _memory.region(tensor))
        del tensor
    assert len(addresses) < 100, "no address was used again, so nothing was shown"


def test_memory_is_known_while_any_tensor_of_it_lives() -> None:
    """Of two objects of one memory, one may go."""
    storage = torch.zeros(3)
    for gone in (0, 1):
        pair = [storage.view(3), storage.view(3)]
        seen = remembered(*pair)
        del pair[gone]
        assert seen.has(storage.view(3), _memory.region(storage))
        assert seen.regions() == [_memory.region(storage)]


def test_a_tensor_that_was_moved_leaves_its_old_memory() -> None:
    """After ``tensor.data = ...`` the tensor is still known, and its old memory may be another tensor's."""
    storage = torch.zeros(3)
    tensor = storage.view(3)
    seen = remembered(tensor)
    tensor.data = torch.ones(3)
    assert seen.has(tensor, _memory.region(tensor))
    assert not seen.has(storage, _memory.region(storage))


def test_what_is_added_later_is_known_too() -> None:
    """Asked between additions, by spans and by regions, and after each clear: by itself and by its memory."""
    seen, tensors = Seen(), [torch.zeros(3), torch.zeros(2, 2), torch.zeros(5)]
    for _ in range(2):
        for count, tensor in enumerate(tensors, 1):
            seen.add([tensor], [_memory.region(tensor)] if count == 2 else spans(tensor))
            assert [seen.has(it, _memory.region(it)) for it in tensors] == [index < count for index in range(3)]
            assert seen.has(tensor.view(-1), _memory.region(tensor))
            assert sorted(seen.regions()) == sorted(map(_memory.region, tensors[:count]))
        seen.clear()


def test_what_lies_apart_is_known_to_at_a_glance() -> None:
    """Neighbours are apart; the tensor itself, a twin of its memory and an overlap on either side are not."""
    buffer = torch.zeros(12)
    seen = Seen()
    for part in (buffer[2:4], buffer[8:10]):
        seen.add([part], spans(part))
        apart = [buffer[:2], buffer[4:6], buffer[6:8], buffer[10:]]
        assert seen.has_none_of(apart, spans(*apart))
        for other in (
            part,
            part.view(2),
            buffer[part.storage_offset() :][1:3],
            buffer[part.storage_offset() - 1 :][:2],
        ):
            assert not seen.has_none_of([*apart, other], spans(*apart, other))
    assert not seen.has_none_of([buffer], spans(buffer))
    seen.clear()
    assert seen.has_none_of([buffer], spans(buffer))


def test_what_is_gone_leaves_its_place_to_others() -> None:
    """Freed memory, and the address of a freed object, may come again: a thousand tensors of one memory, in turn."""
    seen, storage, addresses = Seen(), torch.zeros(3), set()
    for _ in range(1000):
        tensor = storage.view(3)
        addresses.add(id(tensor))
        assert seen.has_none_of([tensor], spans(tensor))
        seen.add([tensor], spans(tensor))
        assert not seen.has_none_of([tensor], spans(tensor))
        del tensor
    assert len(addresses) < 1000, "no address was used again, so nothing was shown"


def test_a_known_tensor_that_was_moved_is_known() -> None:
    """After ``tensor.data = ...`` it lies elsewhere, apart from all, and is the same tensor still."""
    tensor, seen = torch.zeros(3), Seen()
    seen.add([tensor], spans(tensor))
    tensor.data = torch.ones(3)
    assert not seen.has_none_of([tensor], spans(tensor))


def test_beside_regions_nothing_is_told_at_a_glance() -> None:
    """Where anything was added by its region, the long way is asked."""
    tensor, other = torch.zeros(3), torch.zeros(3)
    assert not remembered(tensor).has_none_of([other], spans(other))


class Wrapper(Tensor):
    """A tensor whose values lie in others: it has no memory of its own."""

    @staticmethod
    def __new__(cls: type["Wrapper"], *strides: int) -> "Wrapper":
        """Make one of three rows."""
        return Tensor._make_wrapper_subclass(cls, [3] * len(strides), strides=strides)

    @classmethod
    def __torch_dispatch__(cls, function: object, *_: object) -> None:
        """Refuse everything that would need the values."""
        raise AssertionError(f"{function} was called")


def test_tensors_without_memory_of_their_own_are_apart() -> None:
    """Their address is 0, all the same: each is the same memory as itself, and shares none with others."""
    metas = [torch.zeros(shape, device="meta") for shape in (3, 3, 4)]
    tensors = [Wrapper(1), Wrapper(1), Wrapper(7, 2), Wrapper(7, 2), *metas]
    regions = list(map(_memory.region, tensors))
    assert len(set(regions)) == len(tensors)
    assert _memory.first_overlap(regions) is None
    assert not any(map(_memory.overlaps_itself, regions))
    assert regions == list(map(_memory.region, tensors))
    seen = remembered(tensors[0])
    assert [seen.has(tensor, place) for tensor, place in zip(tensors, regions, strict=True)] == [True] + [False] * 6


def test_remembering_keeps_no_memory_alive() -> None:
    """Only numbers and weak references are kept."""
    tensor = torch.zeros(3)
    seen = remembered(tensor)
    assert seen.has(tensor, _memory.region(tensor))
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is None


def test_a_default_device_changes_nothing() -> None:
    """Under ``torch.device("meta")`` the sums over addresses are still made where they can be read."""
    tensor = torch.zeros(9).as_strided((3, 3), (2, 2))
    with torch.device("meta"):
        assert _memory.overlaps_itself(_memory.region(tensor))
        assert _memory.first_overlap([_memory.region(tensor), _memory.region(tensor[1:])]) is not None
