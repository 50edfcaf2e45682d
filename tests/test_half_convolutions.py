"""Convolutions in half storage and float32 arithmetic, proved against float64 and beside PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import half_reference as reference
import pytest
import torch
from half_reference import HALVES, Operation
from torch import Tensor, nn
from torch.nn import functional

from lucid.amp import autocast

conv1, conv2, conv3 = functional.conv1d, functional.conv2d, functional.conv3d
back1, back2, back3 = functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d

# What it is called: the operation, the shapes of input, weight and bias.
SUMS: dict[str, tuple[Operation, tuple[tuple[int, ...], ...]]] = {
    "conv1d": (conv1, ((2, 4, 9), (6, 4, 3), (6,))),
    "conv2d": (conv2, ((2, 4, 9, 8), (6, 4, 3, 3), (6,))),
    "conv3d": (conv3, ((2, 3, 5, 5, 5), (4, 3, 2, 2, 2), (4,))),
    "without bias": (conv2, ((2, 4, 9, 8), (6, 4, 3, 3))),
    "without batch": (conv2, ((4, 9, 8), (6, 4, 3, 3), (6,))),
    "of nothing": (conv2, ((0, 4, 9, 8), (6, 4, 3, 3), (6,))),
    "strided and padded": (functools.partial(conv2, stride=2, padding=(1, 2)), ((2, 4, 9, 8), (6, 4, 3, 3))),
    "dilated": (functools.partial(conv2, dilation=2), ((2, 4, 9, 8), (6, 4, 3, 3))),
    "depthwise": (functools.partial(conv2, groups=4), ((2, 4, 9, 8), (8, 1, 3, 3), (8,))),
    "padded to the same size": (functools.partial(conv2, padding="same"), ((2, 4, 9, 8), (6, 4, 3, 3))),
    "padded unevenly": (functools.partial(conv1, padding="same"), ((2, 4, 9), (6, 4, 4))),
    "valid": (functools.partial(conv1, padding="valid"), ((2, 4, 9), (6, 4, 3))),
    "non-contiguous": (lambda x, w: conv2(x.transpose(2, 3), w), ((2, 4, 9, 8), (6, 4, 3, 3))),
    "channels last": (
        lambda x, w: conv2(x.contiguous(memory_format=torch.channels_last), w),
        ((2, 4, 9, 8), (6, 4, 3, 3)),
    ),
    "conv_transpose1d": (back1, ((2, 4, 9), (4, 6, 3), (6,))),
    "conv_transpose2d": (
        functools.partial(back2, stride=2, padding=1, output_padding=1, groups=2),
        ((2, 4, 5, 5), (4, 3, 3, 3), (6,)),
    ),
    "conv_transpose3d": (back3, ((2, 3, 4, 4, 4), (3, 2, 2, 2, 2))),
}


# PyTorch's own, once, where its convolution has to pad unevenly.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """The same numbers each time."""
    torch.manual_seed(0)
    yield


def ours(operation: Operation, half: torch.dtype) -> Operation:
    """The operation in the scope under test."""
    return autocast("cpu", half, arithmetic="float32")(operation)


def operands_of(name: str, half: torch.dtype, size: float = 1.0) -> tuple[Operation, list[Tensor]]:
    """An operation and random operands for it."""
    operation, shapes = SUMS[name]
    return operation, [(torch.randn(shape) * size).to(half) for shape in shapes]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", [1.0, 2.0**-12, 2.0**7])
@pytest.mark.parametrize("name", SUMS)
def test_one_rounding_of_a_float32_sum(name: str, size: float, half: torch.dtype) -> None:
    """Output and gradients are within one half rounding and float32's bound of float64, at every size."""
    operation, operands = operands_of(name, half, size)
    gradient = torch.randn_like(operation(*[o.double() for o in operands])).to(half)
    found = reference.run(ours(operation, half), operands, gradient)
    values = reference.exact(operation, operands, gradient)
    sums = reference.magnitudes(operation, operands, gradient)
    counts = reference.terms(operation, operands, gradient)
    for f, v, s, n in zip(found, values, sums, counts, strict=True):
        assert (f.dtype, f.shape) == (half, v.shape)
        fits = v.abs() < torch.finfo(half).max
        assert bool(((f.double() - v).abs()[fits] <= reference.allowed(v, s, n, half)[fits]).all())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d"])
def test_no_further_off_than_pytorch(name: str, half: torch.dtype) -> None:
    """In units in the last place the 99.9th percentile is at most native half's and one more."""
    operation, operands = operands_of(name, half)
    gradient = torch.randn_like(operation(*operands))
    values = reference.exact(operation, operands, gradient)
    found, native = (reference.run(call, operands, gradient) for call in (ours(operation, half), operation))
    for f, n, v in zip(found, native, values, strict=True):
        ours_off, native_off = (reference.percentile(reference.in_last_places(t, v, half)) for t in (f, n))
        assert ours_off <= native_off + 1


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("given", [torch.float32, "half"])
def test_dtypes_and_shapes_are_pytorchs(name: str, given: Any, half: torch.dtype) -> None:
    """From float32 or half operands the output is of PyTorch's kind."""
    operation, operands = operands_of(name, half)
    operands = [o.to(half if given == "half" else given) for o in operands]
    found = ours(operation, half)(*operands)
    native = torch.autocast("cpu", half)(operation)(*operands)
    assert (found.dtype, found.shape, found.requires_grad) == (native.dtype, native.shape, native.requires_grad)


def test_only_the_gradients_that_are_needed() -> None:
    """A first layer's input and a frozen weight get no gradient."""
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    for wants in (x, weight):
        wants.requires_grad_()
        ours(conv2, torch.float16)(x, weight).float().sum().backward()
        assert wants.grad is not None
        wants.grad = None
        wants.requires_grad_(False)
    assert x.grad is None and weight.grad is None


def test_double_backward() -> None:
    """A gradient's gradient is that of float64 within half precision."""
    _, operands = operands_of("conv2d", torch.float16, 0.25)

    def second(call: Operation, leaves: list[Tensor]) -> list[Tensor]:
        for leaf in leaves:
            leaf.requires_grad_()
        gradients = torch.autograd.grad(call(*leaves).square().mean(), leaves, create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.square().sum() for g in gradients]).sum(), leaves))

    half = ours(conv2, torch.float16)
    found = second(lambda *o: half(*o).float(), [o.float() for o in operands])
    values = second(conv2, [o.double() for o in operands])
    for f, v in zip(found, values, strict=True):
        torch.testing.assert_close(f.double(), v, rtol=2e-2, atol=2e-2 * float(v.abs().max()))


def test_a_network_of_modules() -> None:
    """Modules reach it: a small convolutional network has float32's gradients within half precision."""
    up = nn.ConvTranspose2d(4, 2, 2, stride=2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), up, nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(2, 1, 6, 6)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    ours(model, torch.float16)(x).float().square().mean().backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, rtol=2e-2, atol=2e-2 * float(e.abs().max()))
