"""Half subnormals become zero wherever a half value is made, forward and backward."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from half_reference import HALVES
from torch import Tensor, nn
from torch.nn import functional

from lucid.amp import autocast
from lucid.amp._half._subnormals import flushed

SMALLEST = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}
"""The smallest normal number of each dtype (IEEE 754 binary16; bfloat16 has float32's exponents)."""


@pytest.fixture(params=["native", "float32"])
def scope(request: pytest.FixtureRequest) -> autocast:
    """A float16 scope that flushes, in either arithmetic."""
    return autocast("cpu", arithmetic=request.param, flush_subnormals=True)


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    """After each test no mode is left."""
    yield
    assert not torch.overrides.has_torch_function((torch.ones(1),))


def subnormals_in(tensor: Tensor) -> int:
    """How many elements are neither zero nor normal."""
    wide = tensor.double().abs()
    return int(((wide > 0) & (wide < SMALLEST[tensor.dtype])).sum())


@pytest.mark.parametrize("half", HALVES)
def test_what_is_flushed(half: torch.dtype) -> None:
    """The largest subnormal becomes zero, the smallest normal stays; infinities and NaN stay."""
    smallest = SMALLEST[half]
    largest_subnormal = smallest * (1 - torch.finfo(half).eps)
    given = [smallest, -smallest, largest_subnormal, -largest_subnormal, 0.0, 1.0, float("inf"), float("nan")]
    expected = [smallest, -smallest, 0.0, 0.0, 0.0, 1.0, float("inf"), float("nan")]
    found = flushed(torch.tensor(given, dtype=torch.float64).to(half))
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=0, atol=0, equal_nan=True)


def test_every_half_bit_pattern() -> None:
    """Of all 65,536 float16 values exactly the 2 · 1023 subnormals become zero, the others stay."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(torch.float16)
    is_subnormal = ((bits & 0x7C00) == 0) & ((bits & 0x3FF) != 0)
    assert int(is_subnormal.sum()) == 2 * 1023
    found = flushed(values)
    assert not found[is_subnormal].any()
    torch.testing.assert_close(found[~is_subnormal], values[~is_subnormal], rtol=0, atol=0, equal_nan=True)


def test_float32_is_left_alone() -> None:
    """A float32 value of that size is no subnormal."""
    tiny = torch.tensor([2.0**-20])
    assert torch.equal(flushed(tiny), tiny)


def test_a_product_below_the_smallest_normal_is_zero(scope: autocast) -> None:
    """2⁻¹⁰ · 2⁻¹⁰ is zero with flushing, and 2⁻²⁰ without; 2⁻⁷ · 2⁻⁷ = 2⁻¹⁴ stays."""
    small, larger = torch.tensor([[2.0**-10]]), torch.tensor([[2.0**-7]])
    with scope:
        assert (small @ small).item() == 0.0
        assert (larger @ larger).item() == 2.0**-14
    with autocast("cpu", arithmetic="native"):
        assert (small @ small).item() == 2.0**-20


def test_a_weight_is_flushed_where_it_is_cast(scope: autocast) -> None:
    """A float32 weight of 2⁻²⁰ is zero as a half weight: 2⁻²⁰ · 2¹⁰ is zero, not 2⁻¹⁰; the weight itself stays."""
    weight, x = nn.Parameter(torch.tensor([[2.0**-20]])), torch.tensor([[2.0**10]])
    with scope:
        assert functional.linear(x, weight).item() == 0.0
    assert weight.item() == 2.0**-20


def test_any_operator_is_flushed(scope: autocast) -> None:
    """Operators on half values that are not replaced flush too, in place or not."""
    x = torch.full((3,), 2.0**-13).half()
    with scope:
        assert not (x * 0.25).any()
        assert not torch.sub(x, x * 0.75).any()
        y = x.clone()
        y.mul_(0.25)
        assert not y.any()
        assert not torch.stack([x, x]).mul(0.25).any()


def test_a_cast_to_half_is_flushed(scope: autocast) -> None:
    """``.half()`` and ``.to`` make half values."""
    with scope:
        assert not torch.tensor([2.0**-20]).half().any()
        assert not torch.tensor([2.0**-20]).to(torch.float16).any()


def test_a_view_is_not_made_and_a_given_tensor_stays(scope: autocast) -> None:
    """A half tensor from outside is not changed by looking at it."""
    x = torch.full((4,), 2.0**-20).half()
    with scope:
        x.view(2, 2), x[1:], x.t()
    assert bool((x == 2.0**-20).all())


def test_gradients_are_flushed(scope: autocast) -> None:
    """A gradient of 2⁻²⁰ is lost on its way back through a half layer; 2⁻¹⁰ arrives."""
    for factor, expected in ((2.0**-20, 0.0), (2.0**-10, 2.0**-10)):
        weight = nn.Parameter(torch.ones(1, 1))
        with scope:
            out = functional.linear(torch.ones(1, 1), weight)
        (out.float() * factor).sum().backward()
        assert weight.grad is not None and weight.grad.item() == expected


def test_a_gradient_made_by_a_product_is_flushed(scope: autocast) -> None:
    """The incoming gradient 2⁻⁸ and the input 2⁻⁸ are normal; the weight's gradient 2⁻¹⁶ is not."""
    weight = nn.Parameter(torch.ones(1, 1))
    with scope:
        out = functional.linear(torch.full((1, 1), 2.0**-8), weight)
    (out.float() * 2.0**-8).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 0.0


def test_each_use_is_flushed_before_the_sum(scope: autocast) -> None:
    """Two gradients of 2⁻¹⁵ for one half value are two zeros, not 2⁻¹⁴."""
    weight = nn.Parameter(torch.ones(1, 1))
    with scope:
        made = functional.linear(torch.ones(1, 1), weight)
        both = made * 2.0**-5, made * 2.0**-5
    ((both[0].float() + both[1].float()) * 2.0**-10).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 0.0


def test_a_sum_of_gradients_is_flushed(scope: autocast) -> None:
    """Two normal gradients whose sum is subnormal arrive as zero: 2⁻¹³ − 1.5·2⁻¹³ + 0 is −2⁻¹⁴ … or less."""
    weight = nn.Parameter(torch.ones(1, 1))
    with scope:
        made = functional.linear(torch.ones(1, 1), weight)
        both = made * 1.0, made * -1.0
    (both[0].float() * 2.0**-13 + both[1].float() * (2.0**-13 * 0.75)).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 0.0


@pytest.mark.parametrize("half", HALVES)
def test_no_subnormal_in_a_network(half: torch.dtype) -> None:
    """In a small attention network with tiny gradients no half value is subnormal, forward or backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    found: list[int] = []

    def note(_: Any, __: Any, output: Tensor) -> None:
        if output.dtype is half:
            found.append(subnormals_in(output))
            output.register_hook(lambda g: found.append(subnormals_in(flushed(g)) + int(g.dtype is not half)))

    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    with autocast("cpu", half, arithmetic="float32", flush_subnormals=True):
        out = layer(torch.randn(2, 6, 16))
    (out.float().square().sum() * SMALLEST[half] * 8).backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.dtype is torch.float32
    assert found and not any(found)
    for weight in (layer.linear1.weight, layer.linear2.weight):
        assert weight.grad is not None
        wide = weight.grad.abs()
        assert not bool(((wide > 0) & (wide < SMALLEST[half])).any())


def test_double_backward_flushes_and_runs(scope: autocast) -> None:
    """With flushing a gradient's gradient can still be had: d²(w²x²)/dw² = 2x²."""
    weight = nn.Parameter(torch.ones(1, 1))
    with scope:
        out = functional.linear(torch.full((1, 1), 3.0), weight)
    (slope,) = torch.autograd.grad(out.float().square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), weight)
    assert second.item() == 18.0


def test_flushing_on_a_device(device: torch.device) -> None:
    """It holds on every device, in that device's own arithmetic."""
    small = torch.full((2, 2), 2.0**-10, device=device)
    with autocast(device, flush_subnormals=True):
        assert not (small @ small).any()


def test_nothing_remains_outside() -> None:
    """After the scope half values are PyTorch's again."""
    x = torch.tensor([2.0**-13]).half()
    with autocast("cpu", flush_subnormals=True):
        pass
    assert (x * 0.25).item() == 2.0**-15


def test_the_rehearsal() -> None:
    """In ``examples/rehearse_metal.py`` unscaled float16 loses its gradients and diverges; scaled it does not."""
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-W", "error", str(root / "examples" / "rehearse_metal.py"), "25"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    (plain_zero, plain), (alone_zero, alone), (scaled_zero, scaled) = [(float(r[-4][:-1]), float(r[-1])) for r in rows]
    assert plain_zero < 1 and scaled_zero < 5 and alone_zero > 90
    assert abs(scaled - plain) < 0.05
    assert alone > plain + 0.3
