"""The norm of many tensors in one read, against float64 arithmetic."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lucid.amp import _division, _norms, _torch
from lucid.amp._torch import by_device_and_dtype


def total(tensors: list[Tensor], order: float) -> float:
    """The norm from the parts that ``power`` returns."""
    parts = [part.item() for part in _norms.power(by_device_and_dtype(tensors), order)]
    return _norms.root(max(parts, default=0.0) if order == math.inf else sum(parts), order)


def exact(tensors: list[Tensor], order: float) -> float:
    """The norm in float64."""
    flat = [tensor.detach().cpu().double().flatten() for tensor in tensors]
    return torch.linalg.vector_norm(torch.cat(flat), order).item() if flat else 0.0


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sizes_around_every_seam(order: float, dtype: torch.dtype, device: torch.device) -> None:
    """Below, at and above the sizes at which tensors are joined and products are cut into blocks."""
    if dtype is torch.float64 and device.type == "mps":
        pytest.skip("mps has no float64")
    torch.manual_seed(0)
    sizes = [1, 7, _norms._SMALL - 1, _norms._SMALL, _norms._SMALL + 1, _norms._BLOCK + 3]
    tensors = [torch.randn(size).to(device, dtype) for size in sizes]
    for chosen in (tensors, tensors[:3], tensors[3:]):
        # PyTorch's own norms add a million float32 powers in a row, which costs them three digits.
        digits = 1e-5 if order in (2.0, math.inf) and dtype is not torch.bfloat16 else 2e-3
        assert total(chosen, order) == pytest.approx(exact(chosen, order), rel=digits)


def test_shapes_and_strides(device: torch.device) -> None:
    """Scalars, matrices, transposed and strided views count each element once."""
    torch.manual_seed(0)
    base = torch.randn(40, 50, device=device)
    tensors = [base.T, base[::3, ::7], base[0, 0], base[:, 4], torch.randn(200, 200, device=device).T]
    assert total(tensors, 2.0) == pytest.approx(exact(tensors, 2.0), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_large_tensors_are_measured_in_one_launch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the processor large tensors share the batched norm, those with gaps excepted; the total is the same."""
    monkeypatch.setattr(_norms, "_DOTS_ON", set())
    torch.manual_seed(0)
    base = torch.randn(300, 400, dtype=dtype)
    tensors = [torch.randn(_norms._BLOCK + 3, dtype=dtype), base.T, base[:, ::2], torch.randn(5, dtype=dtype)]
    launched: list[int] = []
    norms = _torch.norms
    monkeypatch.setattr(_torch, "norms", lambda group, *rest: launched.append(len(group)) or norms(group, *rest))
    assert total(tensors, 2.0) == pytest.approx(exact(tensors, 2.0), rel=1e-5)
    assert launched == [2]
    tensors[0][7] = math.inf
    assert not math.isfinite(total(tensors, 2.0))


def test_many_small_tensors_beyond_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined in several pieces where one workspace does not hold them, the sum is the same."""
    monkeypatch.setattr("lucid.amp._division.PIECE", 100)
    tensors = [torch.full((30,), 2.0) for _ in range(50)]
    assert total(tensors, 2.0) == pytest.approx(2.0 * math.sqrt(1500), rel=1e-6)


def test_equal_elements_do_not_stagnate() -> None:
    """2²⁵ + 5 times 1 has norm √(2²⁵ + 5): one float32 sum would stop at 2²⁴."""
    assert total([torch.ones(2**25 + 5)], 2.0) == pytest.approx(math.sqrt(2**25 + 5), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("size", [3, _norms._SMALL + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whatever_is_not_finite_shows(
    bad: float, order: float, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """One bad element among good tensors makes some part inf or NaN."""
    tensor = torch.ones(size, dtype=dtype, device=device)
    tensor[size // 2] = bad
    parts = _norms.power(
        by_device_and_dtype([torch.ones(5, device=device), tensor, torch.ones(5, dtype=dtype, device=device)]), order
    )
    assert not all(math.isfinite(part.item()) for part in parts)


def test_robust_survives_what_squares_do_not() -> None:
    """‖(3e30, 4e30)‖ = 5e30 in float32, whose squares overflow; with p = 3 and in bfloat16 too."""
    assert _norms.robust(by_device_and_dtype([torch.tensor([3e30]), torch.tensor([4e30])]), 2.0) == pytest.approx(
        5e30, rel=1e-6
    )
    cube = 1e30 * 2 ** (1 / 3)
    assert _norms.robust(by_device_and_dtype([torch.full((2,), 1e30)]), 3.0) == pytest.approx(cube, rel=1e-6)
    assert _norms.robust(by_device_and_dtype([torch.full((4,), 2.0**100, dtype=torch.bfloat16)]), 2.0) == pytest.approx(
        2.0**101
    )


def test_nothing_has_no_parts() -> None:
    """No tensors make no part, and no launch."""
    assert _norms.power([], 2.0) == []


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, -1.0])
def test_norms_are_combined_to_the_same_bits_in_any_order(order: float) -> None:
    """Ranks hear each other in different orders: 1 and many parts that vanish beside it one by one."""
    norms = [1.0, *(2.0**-27 * (1 + index / 7) for index in range(40))]
    first = _norms.combined(norms, order)
    assert _norms.combined(norms[::-1], order) == first
    assert first == pytest.approx(sum(norm**order for norm in norms) ** (1 / order))


@pytest.mark.parametrize(
    ("norms", "order", "norm"),
    [
        ([3.0, 4.0], 2.0, 5.0),
        ([3.0, 4.0], math.inf, 4.0),
        ([3.0, 4.0], -math.inf, 3.0),
        ([0.0, 4.0], 2.0, 4.0),
        ([0.0, 0.0], 2.0, 0.0),
        ([math.inf, 4.0], -1.0, 4.0),
        ([math.inf, 4.0], 2.0, math.inf),
        ([3e200, 4e200], 2.0, 5e200),
    ],
)
def test_norms_of_parts(norms: list[float], order: float, norm: float) -> None:
    """3 and 4 make 5; of nothing the norm is 0, and inf where p < 0; squares may be beyond float64."""
    assert _norms.combined(norms, order) == pytest.approx(norm)


@pytest.mark.parametrize("order", [2.0, math.inf, -1.0])
def test_a_part_that_is_no_number_makes_the_norm_none(order: float) -> None:
    """Wherever it stands."""
    assert math.isnan(_norms.combined([math.nan, 1.0], order))
    assert math.isnan(_norms.combined([1.0, math.nan], order))


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf, -1.0, 0.0])
@pytest.mark.parametrize("expanded", [False, True])
def test_no_more_of_a_narrow_tensor_than_the_workspace_is_widened_at_once(
    order: float, expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the kernel of a norm in a wider dtype makes a copy; the norm of the pieces is that of the whole."""
    monkeypatch.setattr(_division, "PIECE", 1000)
    tensor = torch.arange(1.0, 51.0).to(torch.bfloat16).expand(100, 50) if expanded else torch.ones(5000).bfloat16()
    widened = []
    norms = _torch.norms

    def told(tensors: list[Tensor], order: float, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
        widened.append(sum(map(Tensor.numel, tensors)) if dtype is torch.float32 else 0)
        return norms(tensors, order, dtype)

    monkeypatch.setattr(_torch, "norms", told)
    (found,) = _norms.norms(by_device_and_dtype([tensor]), order)
    whole = torch.linalg.vector_norm(tensor.double(), order) if order else torch.tensor(1.0)
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(whole.item(), rel=1e-5)
    if order > 0:
        (power,) = _norms.power(by_device_and_dtype([tensor]), order)
        assert _norms.root(power.item(), order) == pytest.approx(whole.item(), rel=1e-5)
    assert max(widened) <= 1000


def test_order_0_counts_the_tensors_that_are_not_all_zero() -> None:
    """Exactly, however many: a bfloat16 holds no 257."""
    tensors = [torch.full((2,), float(index % 2), dtype=torch.bfloat16) for index in range(2 * 257)]
    (found,) = _norms.norms(by_device_and_dtype(tensors), 0.0)
    assert found.item() == 257
