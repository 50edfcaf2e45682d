"""What is done to many tensors at once: put in buckets, joined."""

import functools
import math
from collections.abc import Iterator

import pytest
import torch

from lucid.amp import _torch
from lucid.amp._torch import by_device_and_dtype, joined


@pytest.fixture
def untried() -> Iterator[None]:
    """What is known of operators is forgotten before and after."""
    _torch.check_and_multiply.cache_clear()
    yield
    _torch.check_and_multiply.cache_clear()


@pytest.fixture
def asked(untried: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes on which the batched operator was tried; it runs out of memory at the first try."""
    tried: list[torch.dtype] = []

    def batched(tensors: list[torch.Tensor], *_: torch.Tensor) -> None:
        tried.append(tensors[0].dtype)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setitem(_torch.PRIVATE, "_amp_foreach_non_finite_check_and_unscale_", batched)
    return tried


def test_a_full_memory_does_not_say_that_there_is_no_operator(asked: list[torch.dtype]) -> None:
    """It is tried again at the next use, and then its answer is kept."""
    question = functools.partial(_torch.check_and_multiply, torch.device("cpu"), torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        question()
    assert question() is question() is not None
    assert asked == [torch.float32] * 2


def test_float64_is_checked_and_multiplied_at_once_on_the_cpu_alone() -> None:
    """CUDA's operator would look at it through float32, in which 1e39 is infinite."""
    assert not _torch.check_and_multiply(torch.device("meta"), torch.float64)


def test_the_first_tensor_has_the_first_bucket() -> None:
    """Each bucket holds all tensors of a device and a dtype, in their order; the first one's comes first."""
    kinds = [(torch.bfloat16, "cpu"), (torch.float32, "meta"), (torch.float32, "cpu"), (torch.float64, "cpu")]
    for turn in range(len(kinds)):
        order = kinds[turn:] + kinds[:turn]
        tensors = [torch.zeros(2, dtype=dtype, device=device) for dtype, device in order * 2]
        buckets = by_device_and_dtype(tensors)
        assert (buckets[0][1], buckets[0][0].type) == order[0]
        assert len(buckets) == len(kinds)
        for device, dtype, bucket in buckets:
            alike = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == (device, dtype)]
            assert list(map(id, bucket)) == list(map(id, alike))


@pytest.mark.parametrize("shapes", [[(2,), (3,)], [(), (2, 2), (3,)], [(0,), (2, 1)]])
def test_joined_holds_every_element_in_order(shapes: list[tuple[int, ...]]) -> None:
    """One vector of all elements, also of scalars, matrices, empty and non-contiguous tensors."""
    column = torch.tensor([[7.0, 0.0], [8.0, 0.0]])[:, 0]
    tensors = [torch.full(shape, float(number)) for number, shape in enumerate(shapes, 1)]
    expected = [float(number) for number, shape in enumerate(shapes, 1) for _ in range(math.prod(shape))]
    assert joined([*tensors, column]).tolist() == [*expected, 7.0, 8.0]


def test_joined_takes_tensors_as_they_lie_in_memory(device: torch.device) -> None:
    """Whatever the order of dimensions and wherever there are gaps, all elements are there, tensor after tensor."""
    lying = torch.arange(24.0, device=device)
    tensors = [lying[:12].view(3, 4).t(), lying[12:].view(1, 2, 3, 2).permute(0, 3, 1, 2), lying.view(6, 4)[:, ::2]]
    found = joined(tensors).tolist()
    parts = [sorted(found[:12]), sorted(found[12:24]), sorted(found[24:])]
    assert parts == [sorted(tensor.flatten().tolist()) for tensor in tensors]


@pytest.mark.usefixtures("untried")
def test_an_operator_that_autograd_would_note_is_used_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every other in-place operator it refuses a leaf that requires a gradient: autograd is switched off for it."""

    def noted(tensors: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.mul_(factor)

    monkeypatch.setitem(_torch.PRIVATE, "_amp_foreach_non_finite_check_and_unscale_", noted)
    operator = _torch.check_and_multiply(torch.device("cpu"), torch.float32)
    leaf = torch.full((2,), 8.0, requires_grad=True)
    operator([leaf], torch.zeros(()), torch.full((), 0.5))
    assert leaf.tolist() == [4.0, 4.0]
    assert leaf.grad_fn is None
