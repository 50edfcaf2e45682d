"""Which tensors an iteration has dealt with: as objects, as living memory, at a glance."""

import functools
import itertools
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted
from torch import Tensor

from lucid.amp import _memory, _seen
from lucid.amp._seen import Seen


def spans(*tensors: Tensor) -> _memory.Spans:
    """Where contiguous tensors begin and end."""
    begins = [tensor.data_ptr() for tensor in tensors]
    return begins, [begin + tensor.nbytes for begin, tensor in zip(begins, tensors, strict=True)]


def elements(tensor: Tensor) -> range:
    """Which elements of its storage a vector holds."""
    return range(int(tensor.storage_offset()), int(tensor.storage_offset()) + tensor.numel())


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
    tensors = list(torch.zeros(100, 3))
    seen, addresses = remembered(*tensors), set(map(id, tensors))
    assert all(seen.has(tensor, _memory.region(tensor)) for tensor in tensors)
    del tensors
    others = list(torch.zeros(100, 3))
    assert addresses & set(map(id, others)), "no address was used again, so nothing was shown"
    assert not any(seen.has(other, _memory.region(other)) for other in others)


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
    """Freed memory, and the addresses of freed objects, may come again, several times in an iteration."""
    seen, storage = Seen(), torch.zeros(100, 3)
    addresses: set[int] = set()
    for _ in range(3):
        tensors = list(storage)
        reused = addresses & set(map(id, tensors))
        assert reused or not addresses, "no address was used again, so nothing was shown"
        assert seen.has_none_of(tensors, spans(*tensors))
        seen.add(tensors, spans(*tensors))
        assert not any(seen.has_none_of([tensor], spans(tensor)) for tensor in tensors)
        addresses |= set(map(id, tensors))
        del tensors


def test_after_clear_what_is_added_is_known_though_all_before_was_gone() -> None:
    """An iteration whose tensors were freed before anybody asked leaves nothing behind."""
    seen, tensor = Seen(), torch.zeros(3)
    for _ in range(2):
        gone = torch.zeros(3)
        seen.add([gone], spans(gone))
        del gone
        assert seen.has_none_of([tensor], spans(tensor))
        seen.clear()
        seen.add([tensor], spans(tensor))
        assert not seen.has_none_of([tensor], spans(tensor))
        seen.clear()


@pytest.mark.parametrize("count", [1, 15, 16, 40])
def test_many_are_told_apart_as_few_are(count: int) -> None:
    """However many are asked about at once: the gaps between are free, and one overlap among them is found."""
    buffer = torch.zeros(4 * count + 4)
    known, free = list(buffer.split(2))[::2], list(buffer.split(2))[1::2]
    seen = Seen()
    seen.add(known, spans(*known))
    assert seen.has_none_of(free[:count], spans(*free[:count]))
    clash = [*free[: count - 1], buffer[4 * count - 1 : 4 * count + 1]]
    assert not seen.has_none_of(clash, spans(*clash))
    assert not seen.has_none_of([*free[: count - 1], known[count]], spans(*free[: count - 1], known[count]))


@settings(max_examples=3 * settings.default.max_examples)
@given(draw=st.randoms(use_true_random=False))
def test_additions_of_any_size_are_told_apart(draw: random.Random) -> None:
    """Living tensors are met or not, one by one as all together; what is gone may come again, also several at once."""
    seen, buffer, alive = Seen(), torch.zeros(120), []
    for _ in range(draw.randrange(1, 15)):
        tensors, end = [], draw.randrange(20)
        for _ in range(draw.choice([1, 2, 5, 30])):
            begin = end + draw.randrange(4)
            end = begin + draw.choice([1, 1, 2, 3, 20])
            if end <= len(buffer):
                tensors.append(buffer[begin:end])
        draw.shuffle(tensors)
        taken = {place for tensor in alive for place in elements(tensor)}
        is_free = all(taken.isdisjoint(elements(tensor)) for tensor in tensors)
        assert seen.has_none_of(tensors, spans(*tensors)) is is_free
        if is_free:
            seen.add(tensors, spans(*tensors))
            alive += draw.sample(tensors, draw.randrange(len(tensors) + 1))
        del tensors


def test_many_additions_are_told_apart_in_steps_that_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many optimizers of twenty gradients have twice as many places sorted together, not four times."""

    def sorted_places(additions: int) -> int:
        seen, made, count = Seen(), torch.zeros(20 * additions, 2), 0

        def counted(places: _memory.Spans) -> bool:
            nonlocal count
            count += len(places[0])
            return _memory.are_apart(places)

        monkeypatch.setattr(_seen, "are_apart", counted)
        for group in made.split(20):
            tensors = list(group)
            assert not seen.added or seen.has_none_of(tensors, spans(*tensors))
            seen.add(tensors, spans(*tensors))
        return count

    assert 0 < sorted_places(200) <= 2 * sorted_places(100)


def test_an_interrupt_leaves_nothing_half_indexed() -> None:
    """Wherever Ctrl-C comes, the next question has the same answer, and ``clear`` forgets all."""
    tensors = list(torch.zeros(8, 2))
    for line in itertools.count():
        seen = Seen()
        for tensor in tensors[:6]:
            seen.add([tensor], spans(tensor))
        asked = functools.partial(seen.has_none_of, tensors[6:7], spans(tensors[6]))
        ended = not interrupted(asked, line, (_seen.__file__,))
        assert asked()
        assert not seen.has_none_of(tensors[:1], spans(tensors[0]))
        seen.clear()
        for tensor in tensors[2:]:
            seen.add([tensor], spans(tensor))
        assert seen.has_none_of(tensors[:1], spans(tensors[0]))
        assert not seen.has_none_of(tensors[7:], spans(tensors[7]))
        if ended:
            break
    assert line > 20


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
