"""Gradients of every layout: divided where they are stored, looked at in every element, left as they were laid out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from duck import Duck, with_grad
from torch import Tensor
from torch.utils._pytree import tree_map

from lucid.amp import GradScaler, _memory
from lucid.amp._gradients import Gradients
from lucid.amp._seen import Seen


def non_contiguous() -> Tensor:
    """Every other column of a matrix."""
    return torch.full((4, 6), 12.0)[:, ::2]


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.full((2, 3), 12.0),
    "zero-dimensional": lambda: torch.tensor(12.0),
    "empty": lambda: torch.zeros(0),
    "empty matrix": lambda: torch.zeros(3, 0),
    "transposed": lambda: torch.full((2, 3), 12.0).T,
    "non-contiguous": non_contiguous,
    "channels last": lambda: torch.full((2, 3, 4, 5), 12.0).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.full((1, 3), 12.0).expand(4, 3),
    "expanded from one": lambda: torch.tensor(12.0).expand(2, 2),
    "part of a buffer": lambda: torch.full((10,), 12.0)[3:7].view(2, 2),
    "with a gradient of its own": lambda: torch.full((3,), 12.0, requires_grad=True),
    "with a history": lambda: torch.full((3,), 4.0, requires_grad=True) * 3.0,
    "a parameter": lambda: torch.nn.Parameter(torch.full((3,), 12.0)),
}


@pytest.mark.parametrize("scale", [4.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strided_layout_is_divided_where_it_is_stored(layout: str, dtype: torch.dtype, scale: float) -> None:
    """Shape, strides, dtype and the tensor itself stay; each stored element is divided once."""
    with torch.no_grad():
        shaped = LAYOUTS[layout]()
        if dtype is not torch.float32:
            shaped = torch.as_strided(torch.full((400,), 12.0, dtype=dtype), shaped.shape, shaped.stride(), 3)
    if layout.startswith("with") and dtype is torch.float32:
        shaped = LAYOUTS[layout]()
    parameter = torch.nn.Parameter(torch.zeros(shaped.shape, dtype=dtype))
    parameter.grad = shaped
    strides = shaped.stride()
    GradScaler(scale).unscale_(Duck(parameter))
    assert parameter.grad is shaped
    assert (shaped.stride(), shaped.dtype) == (strides, dtype)
    assert bool((shaped == 12.0 / scale).all())


@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_only_the_view_is_divided(scale: float) -> None:
    """What lies between the elements of a view belongs to somebody else."""
    buffer = torch.full((4, 6), 12.0)
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    parameter.grad = buffer[:, ::2]
    GradScaler(scale).unscale_(Duck(parameter))
    assert buffer[:, ::2].eq(12.0 / scale).all()
    assert buffer[:, 1::2].eq(12.0).all()


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith("empty")])
def test_an_overflow_is_found_in_every_layout(layout: str) -> None:
    """An inf in the last element, wherever that is stored, skips the step."""
    shaped = LAYOUTS[layout]()
    with torch.no_grad():
        shaped[tuple(size - 1 for size in shaped.shape)] = math.inf
    parameter = torch.nn.Parameter(torch.zeros(shaped.shape))
    parameter.grad = shaped
    optimizer = Duck(parameter)
    GradScaler().step(optimizer)
    assert optimizer.steps == 0


def test_a_gradient_that_can_be_differentiated_is_divided() -> None:
    """After backward(create_graph=True): d(p³)/dp = 3p², at p = 2 and scale 4 divided to 12."""
    parameter = torch.nn.Parameter(torch.full((2,), 2.0))
    scaler = GradScaler(4.0)
    (gradient,) = torch.autograd.grad(scaler.scale((parameter**3).sum()), parameter, create_graph=True)
    parameter.grad = gradient
    scaler.unscale_(Duck(parameter))
    assert parameter.grad.tolist() == [12.0, 12.0]
    parameter.grad = None


def test_inside_inference_mode_it_divides_and_leaves_nothing_behind() -> None:
    """unscale_ in inference_mode divides ordinary gradients, and the scaler trains on outside it."""
    scaler, parameter = GradScaler(4.0), with_grad(torch.full((3,), 8.0))
    optimizer = Duck(parameter)
    with torch.inference_mode():
        scaler.scale(torch.ones(2))
        scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [2.0] * 3
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update(3.0)
        parameter.grad = None
        scaler.scale((parameter * 5.0).sum()).backward()
        assert parameter.grad.tolist() == [15.0] * 3


class Wrapper(Tensor):
    """A tensor whose values lie in another, as quantised and asynchronously gathered ones do."""

    @staticmethod
    def __new__(cls: type["Wrapper"], inner: Tensor) -> "Wrapper":
        """Make one of that shape, without memory of its own."""
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the values inside."""
        opened = tree_map(lambda it: it.inner if isinstance(it, Wrapper) else it, (args, kwargs or {}))
        return function(*opened[0], **opened[1])


def clipped(scaler: GradScaler, optimizer: Any) -> None:
    """Unscale and clip by a bound that is far away."""
    scaler.clip_grad_norm_(optimizer, 1e9)


@pytest.mark.parametrize("scale", [4.0, 3.0])
@pytest.mark.parametrize("unscale", [GradScaler.unscale_, GradScaler.step, clipped])
def test_each_gradient_that_wraps_another_tensor_is_divided(unscale: Callable[..., Any], scale: float) -> None:
    """None of them has an address, which makes them no memory in common; a shared one is divided once."""
    inner = [torch.full((3,), 12.0) for _ in range(3)]
    parameters = [with_grad(Wrapper(tensor), torch.zeros(3)) for tensor in inner]
    scaler = GradScaler(scale)
    unscale(scaler, Duck(*parameters))
    unscale(scaler, Duck(*parameters))
    assert [tensor.tolist() for tensor in inner] == [[12.0 / scale] * 3] * 3


class TestSparse:
    """Gradients that hold only some of their elements."""

    def coo(self, indices: list[int], values: list[float]) -> Tensor:
        """A sparse gradient of four elements."""
        return torch.sparse_coo_tensor(torch.tensor([indices]), torch.tensor(values), (4,), check_invariants=True)

    def test_it_is_coalesced_divided_and_stays_sparse(self) -> None:
        """Entries of one index are summed, then divided: (4 + 8) / 4 = 3."""
        parameter = with_grad(self.coo([1, 1, 3], [4.0, 8.0, 20.0]), torch.zeros(4))
        GradScaler(4.0).unscale_(Duck(parameter))
        assert parameter.grad.is_sparse
        assert parameter.grad.to_dense().tolist() == [0.0, 3.0, 0.0, 5.0]

    def test_a_coalesced_one_is_divided_in_place(self) -> None:
        """The tensor stays the gradient."""
        gradient = self.coo([1, 3], [12.0, 20.0]).coalesce()
        parameter = with_grad(gradient, torch.zeros(4))
        GradScaler(4.0).unscale_(Duck(parameter))
        assert parameter.grad is gradient
        assert gradient.to_dense().tolist() == [0.0, 3.0, 0.0, 5.0]

    def test_the_sum_of_one_index_may_overflow(self) -> None:
        """3e38 + 3e38 is inf although neither is: the step is skipped."""
        optimizer = Duck(with_grad(self.coo([1, 1], [3e38, 3e38]), torch.zeros(4)))
        scaler = GradScaler(4.0)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.steps == 0
        assert scaler.get_scale() == 2.0

    def test_an_empty_one_is_no_error(self) -> None:
        """Without entries nothing overflows."""
        optimizer = Duck(with_grad(self.coo([], []), torch.zeros(4)))
        GradScaler().step(optimizer)
        assert optimizer.steps == 1

    def test_a_refusal_leaves_it_as_it_was(self) -> None:
        """It is not coalesced either when another gradient is refused."""
        gradient = self.coo([1, 1], [4.0, 8.0])
        parameter = with_grad(gradient, torch.zeros(4))
        with pytest.raises(ValueError, match="float16"):
            GradScaler(4.0).unscale_(Duck(parameter, with_grad(torch.ones(3, dtype=torch.float16))))
        assert parameter.grad is gradient
        assert not gradient.is_coalesced()
        assert gradient.to_dense().tolist() == [0.0, 12.0, 0.0, 0.0]

    def test_it_is_divided_once_for_two_optimizers(self) -> None:
        """A shared sparse gradient, and one tensor in two parameters, are divided once."""
        shared = with_grad(self.coo([1, 1], [4.0, 8.0]), torch.zeros(4))
        scaler = GradScaler(4.0)
        scaler.unscale_(Duck(shared))
        scaler.unscale_(Duck(shared))
        assert shared.grad.to_dense().tolist() == [0.0, 3.0, 0.0, 0.0]
        gradient = self.coo([2, 2], [4.0, 8.0])
        pair = [with_grad(gradient, torch.zeros(4)) for _ in range(2)]
        scaler.unscale_(Duck(*pair))
        assert [p.grad.to_dense().tolist() for p in pair] == [[0.0, 0.0, 3.0, 0.0]] * 2

    def test_sparse_complex_and_half_are_refused(self) -> None:
        """The dtype rules hold for every layout."""
        for dtype, error in ((torch.float16, ValueError), (torch.complex64, NotImplementedError)):
            gradient = self.coo([1], [4.0]).to(dtype)
            with pytest.raises(error, match="sparse_coo"):
                GradScaler().unscale_(Duck(with_grad(gradient, torch.zeros(4, dtype=dtype))))

    @pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta")
    @pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
    def test_compressed_ones_are_divided_by_their_values(self, layout: torch.layout) -> None:
        """Rows, columns or blocks: the stored values are divided, the layout stays."""
        blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        dense = torch.tensor([[12.0, 0.0], [0.0, 20.0]])
        gradient = dense.to_sparse(layout=layout, blocksize=blocks)
        parameter = torch.nn.Parameter(gradient.clone())
        parameter.grad = gradient
        optimizer, scaler = Duck(parameter), GradScaler(4.0)
        scaler.unscale_(optimizer)
        assert parameter.grad.layout is layout
        assert parameter.grad.to_dense().tolist() == [[3.0, 0.0], [0.0, 5.0]]
        scaler.update()
        parameter.grad.values().fill_(math.nan)
        scaler.step(optimizer)
        assert optimizer.steps == 0


def test_a_jagged_gradient_is_divided() -> None:
    """A nested tensor of rows of different lengths is divided by its values."""
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    parameter = torch.nn.Parameter(rows)
    parameter.grad = torch.nested.nested_tensor_from_jagged(torch.full((5,), 12.0), rows.offsets())
    GradScaler(4.0).unscale_(Duck(parameter))
    assert parameter.grad.values().tolist() == [3.0] * 5


def test_a_view_with_the_negative_bit_is_refused_by_name() -> None:
    """The imaginary part of a conjugate is stored with the other sign: a TypeError that says how to resolve it."""
    parameter, bystander = with_grad(torch.zeros(2)), with_grad(torch.full((3,), 8.0))
    parameter.grad = torch.tensor([4 - 8j, 4 + 8j]).conj().imag
    optimizer = Duck(bystander, parameter)
    with pytest.raises(TypeError, match=r"parameter 1.*negative bit.*resolve_neg"):
        GradScaler(4.0).unscale_(optimizer)
    assert bystander.grad.tolist() == [8.0] * 3
    parameter.grad = parameter.grad.resolve_neg()
    GradScaler(4.0).unscale_(optimizer)
    assert parameter.grad.tolist() == [2.0, -2.0]


def test_one_number_with_the_negative_bit_is_refused_too() -> None:
    """It has no gaps to be known by; a bystander of another dtype is not divided first."""
    parameter, bystander = with_grad(torch.zeros(1)), with_grad(torch.full((3,), 8.0, dtype=torch.float64))
    parameter.grad = torch.tensor([4 - 8j]).conj().imag
    with pytest.raises(TypeError, match=r"parameter 1.*negative bit.*resolve_neg"):
        GradScaler(4.0).unscale_(Duck(bystander, parameter))
    assert bystander.grad.tolist() == [8.0] * 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_gradient_of_strided_layout_is_divided() -> None:
    """Parts of different shapes in one memory, beside a plain gradient of another dtype."""
    parameter = torch.nn.Parameter(torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]))
    parameter.to_padded_tensor(0.0).mul(8.0).sum().backward()
    beside = with_grad(torch.full((3,), 8.0, dtype=torch.float64))
    GradScaler(4.0).unscale_(Duck(beside, parameter))
    assert [part.unique().tolist() for part in parameter.grad.unbind()] == [[2.0], [2.0]]
    assert beside.grad.tolist() == [2.0] * 3


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch was built without oneDNN")
def test_a_layout_that_cannot_be_divided_is_refused_by_name() -> None:
    """An opaque layout is a TypeError that names it and the way out."""
    parameter = torch.nn.Parameter(torch.ones(2, 2).to_mkldnn())
    parameter.grad = torch.ones(2, 2).to_mkldnn()
    bystander = with_grad(torch.full((3,), 8.0))
    with pytest.raises(TypeError, match=r"parameter 1.*mkldnn.*layout.*to_dense"):
        GradScaler().unscale_(Duck(bystander, parameter))
    assert bystander.grad.tolist() == [8.0] * 3


SHORT: dict[str, list[Tensor]] = {
    "plain": [torch.zeros(2, 3), torch.zeros(())],
    "transposed": [torch.zeros(2, 3).T],
    "channels last": [torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "two dtypes": [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)],
    "parts of a buffer": list(torch.zeros(6).split(2)),
    "parts of a buffer in no order": [torch.zeros(8).split(2)[part] for part in (1, 3, 0, 2)],
    "none": [],
}
LONG: dict[str, list[Tensor]] = {
    "with gaps": [torch.zeros(4, 6)[:, ::2]],
    "expanded": [torch.zeros(1, 3).expand(4, 3)],
    "empty": [torch.zeros(2), torch.zeros(0)],
    "of one memory": [torch.zeros(3)] * 2,
    "sparse": [torch.eye(2).to_sparse()],
    "a parameter": [torch.nn.Parameter(torch.zeros(2))],
}


@pytest.mark.parametrize("kind", [*SHORT, *LONG])
def test_ordinary_gradients_take_the_short_way(kind: str) -> None:
    """Dense, without gaps and apart, in any order of dimensions: where they lie is not worked out one by one."""
    gradients = (SHORT | LONG)[kind]
    parameters = [with_grad(one, torch.zeros(one.shape, dtype=one.dtype)) for one in gradients]
    assert isinstance(Gradients(Duck(*parameters), Seen()).places, tuple) is (kind in SHORT)


def test_an_optimizer_without_gradients_lets_the_next_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It divided nothing, so that there is nothing to look for."""
    monkeypatch.setattr(_memory, "region", lambda _: pytest.fail("the long way"))
    scaler, parameter = GradScaler(4.0), with_grad(torch.full((2,), 12.0))
    scaler.step(Duck(torch.nn.Parameter(torch.zeros(2))))
    scaler.step(Duck(parameter))
    assert parameter.grad.tolist() == [3.0, 3.0]
