"""Attention in half storage and float32 arithmetic, and the modules that PyTorch composes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import half_reference as reference
import pytest
import torch
from half_reference import HALVES, Operation
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lucid.amp import autocast

attention = functional.scaled_dot_product_attention

CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "bool mask": {"attn_mask": CAUSAL},
    "float mask": {"attn_mask": torch.randn(6, 6)},
    "mask for each head": {"attn_mask": torch.randn(2, 4, 6, 6)},
}


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """The same numbers each time."""
    torch.manual_seed(0)
    yield


def ours(operation: Any, half: torch.dtype = torch.float16) -> Any:
    """The operation in the scope under test."""
    return autocast("cpu", half, arithmetic="float32")(operation)


class Seen(TorchFunctionMode):
    """Counts what reaches PyTorch's own operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.halves: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a product that PyTorch is to compute on half operands."""
        if any(isinstance(a, Tensor) and a.dtype in HALVES for a in args):
            self.halves.append(func.__name__)
        return func(*args, **(kwargs or {}))


def qkv(half: torch.dtype, *, query: int = 6, heads: int = 4) -> list[Tensor]:
    """Query, key and value of (2, heads, tokens, 8)."""
    return [torch.randn(2, heads, n, 8).to(half) for n in (query, 6, 6)]


def near(found: Tensor, value: Tensor, half: torch.dtype) -> bool:
    """Within one rounding to half of float64, and float32's own error, which softmax's factors magnify."""
    limits = torch.finfo(half)
    allowed = value.abs() * limits.eps / 2 + 2.0**-18 * value.abs().max() + limits.smallest_normal * limits.eps / 2
    return bool(((found.double() - value).abs() <= allowed).all())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_one_rounding(case: str, half: torch.dtype) -> None:
    """Output and gradients are float64's, rounded once."""
    given = CASES[case]
    mask = given.get("attn_mask")
    exact = given if mask is None or mask.dtype is torch.bool else given | {"attn_mask": mask.to(half).double()}
    operands = qkv(half)
    gradient = torch.randn(2, 4, 6, 8).to(half)
    found = reference.run(ours(lambda *o: attention(*o, **given), half), operands, gradient)
    values = reference.exact(lambda *o: attention(*o, **exact), operands, gradient)
    assert all(f.dtype is half and near(f, v, half) for f, v in zip(found, values, strict=True))


@pytest.mark.parametrize("half", HALVES)
def test_no_further_off_than_pytorch(half: torch.dtype) -> None:
    """In units in the last place the 99.9th percentile is at most native half's and one more."""
    operands, gradient = qkv(half), torch.randn(2, 4, 6, 8).to(half)
    values = reference.exact(attention, operands, gradient)
    found, native = (reference.run(call, operands, gradient) for call in (ours(attention, half), attention))
    for f, n, v in zip(found, native, values, strict=True):
        ours_off, native_off = (reference.percentile(reference.in_last_places(t, v, half)) for t in (f, n))
        assert ours_off <= native_off + 1


def test_grouped_heads() -> None:
    """With ``enable_gqa`` fewer key heads serve more query heads, with dropout or without."""
    query, (_, key, value) = torch.randn(2, 4, 6, 8), qkv(torch.float32, heads=2)
    expected = attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(
        ours(attention)(query, key, value, enable_gqa=True).float(), expected, rtol=1e-2, atol=1e-2
    )
    with_dropout = ours(attention)(query, key, value, dropout_p=1e-7, enable_gqa=True)
    torch.testing.assert_close(with_dropout.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", [{}, {"is_causal": True}, {"attn_mask": CAUSAL}, {"attn_mask": torch.zeros(6, 6)}])
def test_dropout_is_that_of_float32(case: dict[str, Any]) -> None:
    """From the same generator state the same weights are dropped as in float32, forward and backward."""
    operands, gradient = qkv(torch.float16), torch.randn(2, 4, 6, 8)

    def drop(*o: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attention(*o, dropout_p=0.3, **case)

    found = reference.run(ours(drop), operands, gradient)
    wide = reference.run(drop, [o.float() for o in operands], gradient)
    for f, w in zip(found, wide, strict=True):
        torch.testing.assert_close(f.float(), w, rtol=4e-3, atol=4e-3)


def test_all_dropped() -> None:
    """With dropout 1 nothing is left, and nothing is NaN."""
    assert torch.equal(ours(attention)(*qkv(torch.float16), dropout_p=1.0), torch.zeros(2, 4, 6, 8).half())


@pytest.mark.parametrize("shape", [(0, 4, 6, 8), (2, 4, 0, 8), (6, 8), (4, 6, 8)])
def test_edges(shape: tuple[int, ...]) -> None:
    """Empty batches and queries, and fewer dimensions, come out as PyTorch's."""
    key = torch.randn(*shape[:-2], 6, 8)
    found = ours(attention)(torch.randn(shape), key, key)
    assert (found.dtype, found.shape) == (torch.float16, torch.Size(shape))


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_what_is_not_finite_is_as_in_float32(odd: float) -> None:
    """What is inf or NaN comes out where the same float32 computation has them."""
    query, key, value = qkv(torch.float16)
    value[0, 0, 0, 0] = odd
    wide = attention(query.float(), key.float(), value.float()).half()
    torch.testing.assert_close(ours(attention)(query, key, value), wide, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_double_backward() -> None:
    """A gradient's gradient is that of float64 within half precision."""

    def second(call: Operation, leaves: list[Tensor]) -> Tensor:
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (slope,) = torch.autograd.grad(call(*leaves).square().sum(), leaves[:1], create_graph=True)
            return torch.autograd.grad(slope.square().sum(), leaves[1])[0]

    operands = qkv(torch.float16)
    half = ours(attention)
    found = second(lambda *o: half(*o).float(), [o.float() for o in operands])
    value = second(attention, [o.double() for o in operands])
    torch.testing.assert_close(found.double(), value, rtol=2e-2, atol=2e-2 * float(value.abs().max()))


MODULES: dict[str, tuple[Any, int]] = {
    "attention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), 3),
    "attention with other widths": (lambda: nn.MultiheadAttention(16, 4, kdim=16, vdim=16, batch_first=True), 3),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 1),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2), 1),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True), 2),
    "transformer": (lambda: nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True), 2),
}


def first(output: Any) -> Tensor:
    """The output itself, or the first of several."""
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, training: bool) -> None:
    """Composed modules compute what float32 does within half precision, in PyTorch's dtype, with gradients."""
    make, inputs = MODULES[name]
    model = make().train(training)
    given = [torch.randn(2, 5, 16) for _ in range(inputs)]
    expected = first(model(*given))
    expected.square().mean().backward()
    slopes = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    found = first(ours(model)(*given))
    assert found.dtype is first(torch.autocast("cpu", torch.float16)(model)(*given)).dtype
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    found.float().square().mean().backward()
    for p, s in zip(model.parameters(), slopes, strict=True):
        torch.testing.assert_close(p.grad, s, rtol=5e-2, atol=2e-2 * float(s.abs().max()) + 1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_evaluation_without_gradients(name: str) -> None:
    """Where PyTorch would take a fast path of its own the result is that of training."""
    make, inputs = MODULES[name]
    model = make().eval()
    given = [torch.randn(2, 5, 16) for _ in range(inputs)]
    expected = first(ours(model)(*given))
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            found = first(ours(model)(*given))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_padding_mask_and_weights() -> None:
    """A padding mask is obeyed, and the attention weights come back where they are asked for."""
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x, hidden = torch.randn(2, 5, 16), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    expected, weights = model(x, x, x, key_padding_mask=hidden)
    found, found_weights = ours(model)(x, x, x, key_padding_mask=hidden)
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found_weights.float(), weights, rtol=1e-2, atol=1e-2)
    assert not bool(found_weights[0, :, 3:].any())


@pytest.mark.parametrize("name", MODULES)
def test_no_product_is_left_to_half_units(name: str) -> None:
    """Inside a composed module too, PyTorch is handed no product of half operands."""
    make, inputs = MODULES[name]
    seen = Seen()
    with seen:
        first(ours(make())(*[torch.randn(2, 5, 16) for _ in range(inputs)]))
    assert not {"linear", "matmul", "bmm", "baddbmm", "scaled_dot_product_attention"} & set(seen.halves)


def test_pytorchs_function_is_left_as_it_was() -> None:
    """Running a composed function's body leaves the function and its module alone."""
    func = functional.multi_head_attention_forward
    before = func.__code__, func.__globals__, functional.has_torch_function
    first(ours(nn.MultiheadAttention(16, 4))(*[torch.randn(5, 2, 16)] * 3))
    assert functional.multi_head_attention_forward is func
    assert (func.__code__, func.__globals__, functional.has_torch_function) == before


def test_a_replaced_attention_is_called() -> None:
    """A function that somebody put in place of PyTorch's is what a composed module calls."""
    calls: list[int] = []
    original = functional.scaled_dot_product_attention

    def other(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", other)
        ours(nn.MultiheadAttention(16, 4))(*[torch.randn(5, 2, 16)] * 3, need_weights=False)
    assert calls == [1]
