"""Products of matrices in half storage and float32 arithmetic, proved against float64 and beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import half_reference as reference
import pytest
import torch
from half_reference import HALVES, Operation
from torch import Tensor
from torch.nn import functional

from lucid.amp import _torch, autocast

Shapes = tuple[tuple[int, ...], ...]


def ours(half: torch.dtype) -> autocast:
    """The scope under test."""
    return autocast("cpu", half, arithmetic="float32")


def in_scope(scope: torch.autocast, operation: Operation) -> Operation:
    """The operation run in a scope."""

    def run(*operands: Tensor) -> Tensor:
        with scope:
            return operation(*operands)

    return run


# A sum of products each: what they are called, the operation, its operands' shapes.
SUMS: dict[str, tuple[Operation, Shapes]] = {
    "linear": (functional.linear, ((5, 33), (7, 33), (7,))),
    "linear without bias": (functional.linear, ((5, 33), (7, 33))),
    "linear of a vector": (functional.linear, ((33,), (7, 33), (7,))),
    "linear in three dimensions": (functional.linear, ((2, 3, 33), (7, 33), (7,))),
    "linear of nothing": (functional.linear, ((0, 33), (7, 33), (7,))),
    "matmul": (torch.matmul, ((5, 33), (33, 7))),
    "matmul of vectors": (torch.matmul, ((33,), (33,))),
    "matmul with a vector": (torch.matmul, ((5, 33), (33,))),
    "matmul of a vector": (torch.matmul, ((33,), (33, 7))),
    "matmul of a vector with a batch": (torch.matmul, ((33,), (2, 33, 7))),
    "matmul of a batch with a vector": (torch.matmul, ((2, 5, 33), (33,))),
    "matmul of a batch with a matrix": (torch.matmul, ((2, 3, 5, 33), (33, 7))),
    "matmul of a matrix with a batch": (torch.matmul, ((5, 33), (3, 33, 7))),
    "matmul broadcast": (torch.matmul, ((4, 1, 5, 33), (3, 33, 7))),
    "matmul over nothing": (torch.matmul, ((5, 0), (0, 7))),
    "matmul of an empty batch": (torch.matmul, ((0, 5, 33), (33, 7))),
    "@": (lambda a, b: a @ b, ((5, 33), (33, 7))),
    "Tensor.matmul": (lambda a, b: a.matmul(b), ((5, 33), (33, 7))),
    "mm": (torch.mm, ((5, 33), (33, 7))),
    "Tensor.mm": (lambda a, b: a.mm(b), ((5, 33), (33, 7))),
    "bmm": (torch.bmm, ((3, 5, 33), (3, 33, 7))),
    "addmm": (torch.addmm, ((7,), (5, 33), (33, 7))),
    "addmm with factors": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), ((5, 7), (5, 33), (33, 7))),
    "addbmm": (torch.addbmm, ((5, 7), (3, 5, 33), (3, 33, 7))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.25), ((3, 5, 7), (3, 5, 33), (3, 33, 7))),
    "baddbmm broadcast": (torch.baddbmm, ((7,), (3, 5, 33), (3, 33, 7))),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((3, 5, 33), (3, 33, 7))),
    "einsum of lists": (lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), ((5, 33), (33, 7))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), ((5, 33), (33, 7))),
    "inner": (torch.inner, ((5, 33), (7, 33))),
    "transposed operands": (lambda a, b: a.t() @ b.t(), ((33, 5), (7, 33))),
    "strided operands": (lambda a, b: a[:, ::2] @ b[::2], ((5, 66), (66, 7))),
}

# Not on PyTorch's list for processors: only what is half already is half arithmetic.
UNCAST: dict[str, tuple[Operation, Shapes]] = {
    "mv": (torch.mv, ((5, 33), (33,))),
    "Tensor.mv": (lambda a, b: a.mv(b), ((5, 33), (33,))),
    "dot": (torch.dot, ((33,), (33,))),
    "addmv": (torch.addmv, ((5,), (5, 33), (33,))),
}

SIZES = {"ordinary": 1.0, "tiny": 2.0**-12, "huge": 2.0**7}


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """The same numbers each time."""
    torch.manual_seed(0)
    yield


def operands_of(shapes: Shapes, half: torch.dtype, size: float = 1.0) -> list[Tensor]:
    """Random operands that half precision holds exactly."""
    return [(torch.randn(shape) * size).to(half) for shape in shapes]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SUMS | UNCAST)
def test_one_rounding_of_a_float32_sum(name: str, size: str, half: torch.dtype) -> None:
    """Output and gradients are within one half rounding and float32's bound of float64, at every size."""
    operation, shapes = (SUMS | UNCAST)[name]
    operands = operands_of(shapes, half, SIZES[size])
    scope = in_scope(ours(half), operation)
    gradient = torch.randn_like(scope(*operands))
    found = reference.run(scope, operands, gradient)
    values = reference.exact(operation, operands, gradient)
    sums = reference.magnitudes(operation, operands, gradient)
    counts = reference.terms(operation, operands, gradient)
    for f, v, s, n in zip(found, values, sums, counts, strict=True):
        assert (f.dtype, f.shape) == (half, v.shape)
        fits = v.abs() < torch.finfo(half).max
        error = (f.double() - v).abs()
        assert bool((error[fits] <= reference.allowed(v, s, n, half)[fits]).all())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["linear", "matmul", "bmm", "addmm", "baddbmm", "einsum"])
def test_no_further_off_than_pytorch(name: str, half: torch.dtype) -> None:
    """In units in the last place the 99.9th percentile is at most native half's and one more."""
    operation, shapes = SUMS[name]
    operands = [o.repeat(*[4] * o.dim()) for o in operands_of(shapes, half)]
    gradient = torch.randn_like(operation(*operands))
    values = reference.exact(operation, operands, gradient)
    found = reference.run(in_scope(ours(half), operation), operands, gradient)
    native = reference.run(operation, operands, gradient)
    for f, n, v in zip(found, native, values, strict=True):
        ours_off, native_off = (reference.percentile(reference.in_last_places(t, v, half)) for t in (f, n))
        assert ours_off <= native_off + 1


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", SUMS | UNCAST)
@pytest.mark.parametrize("given", [torch.float32, "half"])
def test_dtypes_shapes_and_requires_grad_are_pytorchs(name: str, given: Any, half: torch.dtype) -> None:
    """From float32 or half operands, with and without gradients, the output is of PyTorch's kind."""
    operation, shapes = (SUMS | UNCAST)[name]
    operands = [o.to(half if given == "half" else given) for o in operands_of(shapes, half)]
    for needs in (True, False):
        leaves = [o.clone().requires_grad_(needs) for o in operands]
        found = in_scope(ours(half), operation)(*leaves)
        native = in_scope(torch.autocast("cpu", half), operation)(*leaves)
        assert (found.dtype, found.shape) == (native.dtype, native.shape)
        assert found.requires_grad == native.requires_grad


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("operation", [functional.linear, lambda a, b: a @ b.t(), lambda a, b: torch.mm(a, b.t())])
@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan"), 6e4])
def test_what_is_not_finite_is_as_in_float32(operation: Operation, odd: float, half: torch.dtype) -> None:
    """Infinities, NaN and what exceeds half's range come out as the same float32 computation rounded once."""
    a, b = operands_of(((4, 8), (6, 8)), half)
    a[1, 2], b[3, 2] = odd, 3.0
    gradient = torch.ones(4, 6, dtype=half)
    found = reference.run(in_scope(ours(half), operation), [a, b], gradient)
    wide = reference.run(operation, [a.float(), b.float()], gradient.float())
    for f, w in zip(found, wide, strict=True):
        torch.testing.assert_close(f, w.to(half), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["linear", "matmul broadcast", "addmm with factors", "einsum"])
def test_double_backward(name: str) -> None:
    """A gradient's gradient is that of float32 within half precision."""
    operation, shapes = SUMS[name]
    operands = operands_of(shapes, torch.float16, 0.25)

    def second(call: Operation, leaves: list[Tensor]) -> list[Tensor]:
        for leaf in leaves:
            leaf.requires_grad_()
        gradients = torch.autograd.grad(call(*leaves).float().square().sum(), leaves, create_graph=True)
        total = torch.stack([g.float().square().sum() for g in gradients]).sum()
        return list(torch.autograd.grad(total, leaves))

    found = second(in_scope(ours(torch.float16), operation), [o.float() for o in operands])
    values = second(operation, [o.double() for o in operands])
    for f, v in zip(found, values, strict=True):
        torch.testing.assert_close(f.double(), v, rtol=2e-2, atol=2e-2 * float(v.abs().max()))


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: torch.mm(a, b, out=torch.empty(4, 4)),
        lambda a, b: torch.mm(a, b[0]),
        lambda a, b: torch.bmm(a, b),
        lambda a, b: torch.matmul(a, b[:2]),
        lambda a, b: functional.linear(a, b.double()),
        lambda a, b: torch.mm(a, b, wrong=1),
        lambda a, b: torch.mm(a),
        lambda a, b: torch.mm(a, 3),
    ],
)
def test_what_pytorch_refuses_is_refused(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A call that PyTorch refuses in its own scope is refused here, with the same kind of error."""
    a, b = torch.ones(4, 4), torch.ones(4, 4)

    def outcome(scope: torch.autocast) -> type[Exception] | torch.dtype:
        try:
            with scope:
                return call(a, b).dtype
        except (RuntimeError, TypeError) as error:
            return type(error)

    assert outcome(ours(torch.float16)) == outcome(torch.autocast("cpu", torch.float16))


def test_float64_and_integers_are_left_alone() -> None:
    """What autocast does not cast is computed as it is."""
    with ours(torch.float16):
        assert (torch.ones(2, 2).double() @ torch.ones(2, 2).double()).dtype is torch.float64
        assert (torch.ones(2, 2).long() @ torch.ones(2, 2).long()).dtype is torch.int64


TELLS_VERSIONS = pytest.mark.skipif(_torch.version(torch.ones(1)) is None, reason="this torch tells no versions")


@TELLS_VERSIONS
def test_a_weight_is_cast_once_a_scope() -> None:
    """Two uses of a weight share one half copy."""
    weight = torch.nn.Parameter(torch.ones(1, 1))
    x = torch.ones(1, 1)
    with ours(torch.float16):
        products = [functional.linear(x, weight) for _ in range(2)]
        sources = [product.grad_fn.next_functions[1][0] for product in products]
        assert sources[0] is sources[1]


def test_a_weight_that_was_changed_is_cast_again() -> None:
    """A weight changed in place inside the scope is used as it is now."""
    weight = torch.nn.Parameter(torch.full((1, 1), 1 / 3))
    x = torch.ones(1, 1)
    with ours(torch.float16):
        functional.linear(x, weight)
        with torch.no_grad():
            weight.mul_(3)
        assert functional.linear(x, weight).item() == 1.0


def test_a_copy_made_without_gradients_is_not_used_with_them() -> None:
    """A weight first used under ``no_grad`` still gets its gradient in the same scope."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with ours(torch.float16):
        with torch.no_grad():
            functional.linear(torch.ones(1, 2), weight)
        functional.linear(torch.ones(1, 2), weight).float().sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(2, 2))


def test_inference_mode() -> None:
    """Inference computes the same, and its tensors are inference tensors."""
    weight, x = torch.nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4)
    with ours(torch.float16):
        expected = functional.linear(x, weight)
        with torch.inference_mode():
            found = functional.linear(x, weight)
        again = functional.linear(x, weight)
    assert found.is_inference()
    assert torch.equal(found, expected)
    assert again.requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # PyTorch's own, at its first forward derivative
def test_function_transforms_are_pytorchs() -> None:
    """``vmap``, ``grad`` and forward-mode derivatives go through PyTorch's own operators, and are right."""
    weight, x = torch.randn(3, 4), torch.randn(5, 4)
    with ours(torch.float16):
        many = torch.vmap(lambda row: functional.linear(row, weight))(x)
        slope = torch.func.grad(lambda w: functional.linear(x, w).float().sum())(weight)
        _, tangent = torch.func.jvp(lambda w: functional.linear(x, w), (weight,), (weight,))
    torch.testing.assert_close(many.float(), x @ weight.t(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(slope, x.sum(0).expand(3, 4), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(tangent.float(), x @ weight.t(), rtol=1e-2, atol=1e-2)
