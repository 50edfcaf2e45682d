"""LSTM, GRU and simple recurrent networks in half storage and float32 arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from half_reference import HALVES
from torch import Tensor, nn

from lucid.amp import autocast

CLASSES = (nn.LSTM, nn.GRU, nn.RNN)

SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
}


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """The same numbers each time."""
    torch.manual_seed(0)
    yield


def ours(operation: Any, half: torch.dtype = torch.float16) -> Any:
    """The operation in the scope under test."""
    return autocast("cpu", half, arithmetic="float32")(operation)


def tensors(outputs: Any) -> list[Tensor]:
    """Output and state, in order; a packed output's data."""
    if isinstance(outputs, nn.utils.rnn.PackedSequence):
        return [outputs.data]
    return [outputs] if isinstance(outputs, Tensor) else [t for o in outputs for t in tensors(o)]


def rounded(module: nn.Module, half: torch.dtype) -> nn.Module:
    """The module with parameters that half precision holds exactly."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(half))
    return module


def slopes(module: nn.Module, outputs: Any) -> list[Tensor]:
    """The parameters' gradients of a sum over everything that came out."""
    module.zero_grad()
    torch.stack([(t.double() ** 2).sum() for t in tensors(outputs)]).sum().backward()
    return [p.grad.double().clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cls", CLASSES)
def test_one_rounding(cls: Any, shape: str, half: torch.dtype) -> None:
    """Outputs, states and gradients are those of float64 on the same half operands, rounded once."""
    module = rounded(cls(6, 8, **SHAPES[shape]), half)
    x = torch.randn(5, 3, 6).to(half)
    found = ours(module, half)(x)
    found_slopes = slopes(module, found)
    module.double()
    exact = module(x.double())
    eps = torch.finfo(half).eps
    for f, e in zip(tensors(found), tensors(exact), strict=True):
        assert f.shape == e.shape
        assert bool(((f.double() - e).abs() <= e.abs() * eps / 2 + 1e-6).all())
    for s, e in zip(found_slopes, slopes(module, exact), strict=True):
        # The loss's own slope was computed from rounded outputs: two roundings and their sum over the steps.
        torch.testing.assert_close(s, e, rtol=8 * eps, atol=4 * eps * float(e.abs().max()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", CLASSES)
def test_dtypes_are_pytorchs(cls: Any, given: torch.dtype, packed: bool) -> None:
    """Output and state have the dtypes that PyTorch gives them, from float32 or half, padded or packed."""
    module = cls(6, 8)
    x: Any = torch.randn(5, 3, 6).to(given)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2])
    found, native = ours(module, torch.bfloat16)(x), torch.autocast("cpu", torch.bfloat16)(module)(x)
    for f, n in zip(tensors(found), tensors(native), strict=True):
        assert (f.dtype, f.shape, f.requires_grad) == (n.dtype, n.shape, n.requires_grad)


@pytest.mark.parametrize("cls", CLASSES)
def test_packed_and_its_gradients(cls: Any) -> None:
    """Sequences of different lengths are float32's within half precision, forward and backward."""
    module = rounded(cls(6, 8), torch.float16)
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 6), [5, 4, 2])
    found = ours(module)(x)
    found_slopes = slopes(module, found)
    expected = module(x)
    for f, e in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(f.float(), e, rtol=4e-3, atol=4e-3)
    for s, e in zip(found_slopes, slopes(module, expected), strict=True):
        torch.testing.assert_close(s, e, rtol=2e-2, atol=2e-2 * float(e.abs().max()))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("cls", CLASSES)
def test_dropout_between_layers(cls: Any, half: torch.dtype) -> None:
    """What is dropped is float32's from the same generator state, the backward drops the same, and draws nothing."""
    module = rounded(cls(6, 8, 3, dropout=0.5), half)
    x = torch.randn(5, 3, 6).to(half)
    torch.manual_seed(7)
    found = ours(module, half)(x)
    drawn = torch.rand(3)
    before = torch.get_rng_state()
    found_slopes = slopes(module, found)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    expected = module(x.float())
    assert torch.equal(torch.rand(3), drawn)
    eps = torch.finfo(half).eps
    for f, e in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(f.float(), e, rtol=4 * eps, atol=4 * eps)
    for s, e in zip(found_slopes, slopes(module, expected), strict=True):
        torch.testing.assert_close(s, e, rtol=16 * eps, atol=16 * eps * float(e.abs().max()) + 1e-6)


@pytest.mark.parametrize("cls", CLASSES)
def test_no_gradients(cls: Any) -> None:
    """Without gradients the result is that with them, and nothing needs a gradient."""
    module, x = cls(6, 8), torch.randn(5, 3, 6)
    expected = ours(module)(x)
    with torch.no_grad():
        found = ours(module)(x)
    for f, e in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(f, e) and not f.requires_grad


def test_backward_twice() -> None:
    """With ``retain_graph=True`` a second backward gives the same gradients."""
    module, x = nn.LSTM(6, 8), torch.randn(5, 3, 6)
    loss = ours(module)(x)[0].float().sum()
    first, second = (torch.autograd.grad(loss, list(module.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(f, s) for f, s in zip(first, second, strict=True))


def test_double_backward_is_refused_or_right() -> None:
    """A gradient's gradient of an LSTM is refused in words; a simple network's is float32's."""
    lstm, x = nn.LSTM(3, 4), torch.randn(4, 2, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(ours(lstm)(x)[0].float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|not implemented|does not require grad"):
        slope.square().sum().backward()
    rnn = nn.RNN(3, 4)

    def second(call: Any) -> Tensor:
        (slope,) = torch.autograd.grad(call(x)[0].float().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    torch.testing.assert_close(second(ours(rnn)), second(rnn), rtol=3e-2, atol=1e-3)


def test_a_given_state_and_its_gradient() -> None:
    """A state handed in is used, and has its gradient in its own dtype."""
    for cls in CLASSES:
        module = cls(6, 8)
        state = torch.randn(1, 3, 8, requires_grad=True)
        given = (state, torch.zeros(1, 3, 8)) if cls is nn.LSTM else state
        ours(module)(torch.randn(5, 3, 6), given)[0].float().sum().backward()
        assert state.grad is not None and state.grad.dtype is torch.float32 and bool(state.grad.any())
