"""What is kept for the backward: half operands only, counted with PyTorch's saved-tensor hooks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from half_reference import HALVES
from torch import Tensor, nn
from torch.nn import functional

from lucid.amp import _torch, autocast

Call = Callable[[], Tensor]


def saved_bytes(call: Call, scope: torch.autocast) -> int:
    """Bytes saved for the backward in a scope, each storage counted once."""
    storages: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The tensor is held, so that its address is not used again.
        storages[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), scope:
        output = call()
    assert output.requires_grad
    return sum(size for size, _ in storages.values())


def weights(*shape: int) -> Tensor:
    """A float32 parameter."""
    return nn.Parameter(torch.randn(shape))


def linear() -> Call:
    """A layer of 64 to 48 on three dimensions."""
    x, weight, bias = torch.randn(4, 16, 64), weights(48, 64), weights(48)
    return lambda: functional.linear(x, weight, bias)


def mlp() -> Call:
    """Two layers with a ReLU."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(64, 32)
    return lambda: model(x)


def matmul() -> Call:
    """A batch of matrices with a matrix."""
    a, b = weights(4, 16, 32), weights(32, 24)
    return lambda: a @ b


def sums() -> Call:
    """A sum with a product of batches."""
    c, a, b = weights(4, 16, 24), weights(4, 16, 32), weights(4, 32, 24)
    return lambda: torch.baddbmm(c, a, b)


def einsum() -> Call:
    """A contraction."""
    a, b = weights(4, 16, 32), weights(4, 32, 24)
    return lambda: torch.einsum("bij,bjk->bik", a, b)


def convolution() -> Call:
    """Two convolutions."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(4, 3, 16, 16)
    return lambda: model(x)


def attention() -> Call:
    """Attention of four heads."""
    q, k, v = (weights(4, 4, 32, 16) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(q, k, v)


def dropped() -> Call:
    """Attention with dropout."""
    q, k, v = (weights(4, 4, 32, 16) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def encoder() -> Call:
    """An encoder layer."""
    model, x = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), torch.randn(4, 16, 32)
    return lambda: model(x)


def recurrence(cls: Any) -> Callable[[], Call]:
    """One recurrent layer."""

    def make() -> Call:
        model, x = cls(16, 32), torch.randn(12, 4, 16)
        return lambda: model(x)[0]

    return make


CASES: dict[str, Callable[[], Call]] = {
    **{f.__name__: f for f in (linear, mlp, matmul, sums, einsum, convolution, attention, dropped, encoder)},
    **{cls.__name__: recurrence(cls) for cls in (nn.LSTM, nn.GRU, nn.RNN)},
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_keeps_no_more_than_torch_autocast(case: str, half: torch.dtype) -> None:
    """At most 1.02 times the bytes that ``torch.autocast`` saves."""
    torch.manual_seed(0)
    call = CASES[case]()
    try:
        native = saved_bytes(call, torch.autocast("cpu", half))
    except RuntimeError as error:
        pytest.skip(f"PyTorch has nothing to compare with: {error}")
    assert saved_bytes(call, autocast("cpu", half, arithmetic="float32")) <= 1.02 * native


def test_a_float16_lstm_keeps_no_more_than_float32s() -> None:
    """Where PyTorch has no float16 LSTM, the bound is float32's memory."""
    call = recurrence(nn.LSTM)()
    ours = saved_bytes(call, autocast("cpu", torch.float16, arithmetic="float32"))
    assert ours <= 1.02 * saved_bytes(call, torch.autocast("cpu", enabled=False))


@pytest.mark.skipif(_torch.version(torch.ones(1)) is None, reason="this torch tells no versions, so none is kept")
def test_no_copies_outlive_the_scope() -> None:
    """After the scope the half copy of a weight lives only as long as a graph needs it."""

    def halves() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (37, 41)]
        return sum(t.dtype is torch.float16 for t in tensors)

    weight = weights(37, 41)
    with autocast("cpu", arithmetic="float32"):
        output = functional.linear(torch.randn(2, 41), weight)
        assert halves() == 1
    del output
    assert halves() == 0


def peak_above_saved(call: Call, scope: torch.autocast) -> int:
    """The most bytes allocated at once in a scope beyond those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=activities) as profile, scope:
        output = call()
    del output
    now = peak = 0
    for event in profile.events():
        if event.name == "[memory]":
            now += event.cpu_memory_usage
            peak = max(peak, now)
    return peak


def test_the_peak_is_one_operators_float32_operands() -> None:
    """Through many layers the peak is what is saved and the float32 operands and result of one layer."""
    width, layers = 64, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    x = torch.randn(256, width)
    scope = autocast("cpu", torch.float16, arithmetic="float32")
    model(x), saved_bytes(lambda: model(x), scope)
    saved = layers * (2 * width * width + 2 * 256 * width) + 2 * 256 * width
    largest = 4 * (256 * width + width * width + 256 * width)
    assert peak_above_saved(lambda: model(x), scope) <= saved + largest + 2 * 256 * width
