"""``GradScaler.clip_grad_norm_``: what ``unscale_`` and PyTorch's clipping give, in one multiplication.

The expected values are PyTorch's own clipping of gradients that never were scaled, or arithmetic on paper.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from lucid.amp import GradScaler, _clip, _norms
from lucid.amp._torch import by_device_and_dtype

SHAPES = [(3, 5), (7,), (), (200, 130), (2, 3, 4)]
ORDERS = [2.0, 1.0, 3.0, 0.5, math.inf, 0.0, -1.0, -math.inf]


def owned(*gradients: Tensor) -> tuple[list[Parameter], torch.optim.SGD]:
    """Parameters that hold these gradients, and an optimizer of learning rate 1 over them."""
    parameters = [Parameter(torch.zeros_like(gradient.to_dense())) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def random(dtype: torch.dtype, device: torch.device, size: float = 1.0) -> list[Tensor]:
    """Gradients of ordinary values in several shapes."""
    torch.manual_seed(7)
    return [(torch.randn(shape) * size).to(device, dtype) for shape in SHAPES]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Two roundings for bfloat16; for the others those of a sum of 26,000 powers."""
    return {"rtol": {torch.bfloat16: 2.0**-6, torch.float32: 1e-5, torch.float64: 1e-12}[dtype], "atol": 0.0}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1024.0, 3.0, 0.1])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_as_unscaling_and_then_pytorchs_clipping(
    order: float, dtype: torch.dtype, scale: float, max_norm: float, device: torch.device
) -> None:
    """The norm and every gradient are those of PyTorch's clipping of the true gradients, within rounding."""
    if dtype is torch.float64 and device.type == "mps":
        pytest.skip("mps has no float64")
    scaler = GradScaler(scale)
    true = [(g.cpu().double() * scaler.get_scale()).to(dtype).to(device) for g in random(dtype, device)]
    expected, _ = owned(*[(g.cpu().double() / scaler.get_scale()).to(dtype).to(device) for g in true])
    norm = clip_grad_norm_(expected, max_norm, order)
    parameters, optimizer = owned(*true)
    found = scaler.clip_grad_norm_(optimizer, max_norm, order)
    torch.testing.assert_close(found, norm, **tolerance(dtype))
    for parameter, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, **tolerance(dtype))


def test_three_and_four_have_norm_five() -> None:
    """Gradients 3 and 4 at scale 8, clipped to 1: norm 5, gradients 0.6 and 0.8, and the step uses them."""
    parameters, optimizer = owned(torch.tensor([24.0]), torch.tensor([32.0]))
    scaler = GradScaler(8.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5.0, rel=1e-6)
    scaler.step(optimizer)
    assert [parameter.item() for parameter in parameters] == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_below_the_bound_it_is_division_to_the_last_bit(device: torch.device) -> None:
    """Where nothing is clipped the gradients hold the correctly rounded quotient, at scale 3 too."""
    scaled = torch.arange(1.0, 2000.0, device=device)
    parameters, optimizer = owned(scaled)
    GradScaler(3.0).clip_grad_norm_(optimizer, 1e9)
    quotient = (scaled.cpu().double() / 3.0).float()
    if device.type in ("cpu", "cuda"):
        assert torch.equal(parameters[0].grad.cpu(), quotient)
    else:
        torch.testing.assert_close(parameters[0].grad.cpu(), quotient)


def test_it_is_unscale_for_the_stages() -> None:
    """It raises what unscale_ raises after unscale_, after itself and after step, and step divides no more."""
    _, optimizer = owned(torch.tensor([8.0]))
    scaler = GradScaler(8.0)
    scaler.clip_grad_norm_(optimizer, 10.0)
    for call in (lambda: scaler.clip_grad_norm_(optimizer, 10.0), lambda: scaler.unscale_(optimizer)):
        with pytest.raises(RuntimeError, match="already ran"):
            call()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.clip_grad_norm_(optimizer, 10.0)
    assert optimizer.param_groups[0]["params"][0].item() == -1.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("order", ORDERS)
def test_an_overflow_clips_nothing_and_is_skipped(bad: float, order: float, device: torch.device) -> None:
    """The finite gradients hold their true values, the norm says inf or NaN, the step is skipped."""
    parameters, optimizer = owned(torch.tensor([800.0, bad], device=device), torch.tensor([16.0], device=device))
    scaler = GradScaler(8.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert not math.isfinite(norm.item())
    assert parameters[0].grad[0].item() == 100.0
    assert parameters[1].grad.item() == 2.0
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert all(parameter.abs().sum().item() == 0 for parameter in parameters)


def test_error_if_nonfinite_raises_and_the_iteration_can_go_on() -> None:
    """The error names the norm; afterwards step is skipped and update backs off."""
    _, optimizer = owned(torch.tensor([math.inf]))
    scaler = GradScaler(8.0)
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 is inf"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_sum_of_squares_that_overflows_is_no_overflow(scale: float, device: torch.device) -> None:
    """Four gradients of 1e25: their squares overflow float32, their norm 2e25 does not; clipped to 1 each is ½."""
    parameters, optimizer = owned(torch.full((4,), 1e25 * scale, device=device))
    scaler = GradScaler(scale)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(2e25, rel=1e-5)
    assert parameters[0].grad.tolist() == pytest.approx([0.5] * 4, rel=1e-5)
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


def test_scaled_gradients_whose_squares_vanish_have_a_norm() -> None:
    """At the smallest scale 3 and 4 are 3·2⁻¹²⁶ and 4·2⁻¹²⁶: their squares are 0 in float32, their norm is 5."""
    _, optimizer = owned(torch.tensor([3.0 * 2.0**-126, 4.0 * 2.0**-126]))
    assert GradScaler(2.0**-126).clip_grad_norm_(optimizer, 10.0).item() == pytest.approx(5.0, rel=1e-6)


def test_a_factor_below_float32_is_made_in_two_steps() -> None:
    """At scale 2¹²⁷ and a norm of 2 clipped to 1e-3 the one factor would be subnormal: 1 becomes 5e-4 all the same."""
    parameters, optimizer = owned(torch.tensor([2.0**127] * 4) / 2)
    scaler = GradScaler(2.0**126)
    assert scaler.clip_grad_norm_(optimizer, 1e-3).item() == pytest.approx(2.0)
    assert parameters[0].grad.tolist() == pytest.approx([5e-4] * 4, rel=1e-5)


def test_a_quotient_that_overflows_is_one_though_the_gradient_is_finite() -> None:
    """At scale ¼ a gradient of 3e38 is inf once it is unscaled: nothing is clipped, the step is skipped."""
    parameters, optimizer = owned(torch.tensor([3e38]), torch.tensor([1.0]))
    scaler = GradScaler(0.25)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == math.inf
    assert parameters[1].grad.item() == 4.0
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


def test_parameters_restricts_the_norm_and_the_clipping() -> None:
    """Only the first gradient, 3, counts and is clipped to 1; the other is unscaled to 40 all the same."""
    parameters, optimizer = owned(torch.tensor([24.0]), torch.tensor([320.0]))
    scaler = GradScaler(8.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0, parameters=[parameters[0]]).item() == pytest.approx(3.0)
    assert parameters[0].grad.item() == pytest.approx(1.0, rel=1e-5)
    assert parameters[1].grad.item() == 40.0


@pytest.mark.parametrize("view", [lambda gradient: gradient.detach(), lambda gradient: gradient.view(1, 1).T])
def test_parameters_choose_memory_and_not_tensor_objects(view: Callable[[Tensor], Tensor]) -> None:
    """Where another parameter's gradient is the same memory, choosing either one clips it: 3 to 1, once."""
    parameters, optimizer = owned(torch.tensor([24.0]), torch.tensor([320.0]))
    twin = Parameter(torch.zeros_like(view(parameters[0].grad)))
    twin.grad = view(parameters[0].grad)
    optimizer.add_param_group({"params": [twin]})
    norm = GradScaler(8.0).clip_grad_norm_(optimizer, 1.0, parameters=[twin])
    assert norm.item() == pytest.approx(3.0)
    assert parameters[0].grad.item() == pytest.approx(1.0, rel=1e-5)
    assert parameters[1].grad.item() == 40.0


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_gradient_adds_nothing_to_the_norm(dtype: torch.dtype, order: float) -> None:
    """Beside (12, 16) / 4 = (3, 4) an empty one is 0 of every order: the norm is 7, 5 or 4."""
    _, optimizer = owned(torch.tensor([12.0, 16.0], dtype=dtype), torch.zeros(0, dtype=dtype))
    assert GradScaler(4.0).clip_grad_norm_(optimizer, 1e9, order).item() == {1.0: 7.0, 2.0: 5.0, math.inf: 4.0}[order]


@pytest.mark.parametrize("first", ["cpu", "meta"])
def test_the_norm_is_on_the_first_tensors_device_in_the_widest_dtype(first: str) -> None:
    """float64 beside float32, wherever it stands; the device of the first gradient, as in PyTorch."""
    second = "meta" if first == "cpu" else "cpu"
    kinds = [(first, torch.float32), (second, torch.float64), (second, torch.float32)]
    buckets = by_device_and_dtype([torch.zeros(2, dtype=dtype, device=device) for device, dtype in kinds])
    norm = _clip.as_tensor(5.0, buckets)
    assert (norm.device.type, norm.dtype) == (first, torch.float64)


@pytest.mark.parametrize(
    ("gradients", "scale", "order"),
    [
        ([torch.tensor(8.0)] * 2000, 4.0, 0.01),
        ([torch.full((4,), 1.6e308, dtype=torch.float64)], 1.0, 2.0),
        ([torch.full((4,), 1.6e308, dtype=torch.float64), torch.ones(3, dtype=torch.float32)], 1.0, 2.0),
        ([torch.full((4,), 8.0)], 4.0, 0.001),
    ],
)
def test_a_norm_beyond_every_number_clips_to_nothing(gradients: list[Tensor], scale: float, order: float) -> None:
    """The gradients are finite, so the step lands; max_norm over an infinite norm is 0, as in PyTorch's clipping."""
    parameters, optimizer = owned(*gradients)
    scaler = GradScaler(scale)
    assert scaler.clip_grad_norm_(optimizer, 1.0, order).item() == math.inf
    assert all(not parameter.grad.any() for parameter in parameters)
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


def test_an_infinite_bound_clips_no_infinite_norm() -> None:
    """No bound was asked for: the gradients are unscaled, whatever their norm."""
    parameters, optimizer = owned(torch.full((4,), 1.6e308, dtype=torch.float64))
    assert GradScaler(1.0).clip_grad_norm_(optimizer, math.inf).item() == math.inf
    assert parameters[0].grad.eq(1.6e308).all()


@pytest.mark.parametrize("enabled", [True, False])
def test_no_parameters_are_none(enabled: bool) -> None:
    """An empty list restricts the clipping to nothing, enabled or not: the norm is 0 and the gradient as it was."""
    parameters, optimizer = owned(torch.tensor([24.0]))
    scaler = GradScaler(1.0, enabled=enabled)
    assert scaler.clip_grad_norm_(optimizer, 1.0, parameters=[]).item() == 0.0
    assert parameters[0].grad.item() == 24.0


def test_an_overflow_beside_the_chosen_parameters_is_one() -> None:
    """The others are judged too: the step is skipped, and what was chosen is not clipped."""
    parameters, optimizer = owned(torch.tensor([24.0]), torch.tensor([math.nan]))
    scaler = GradScaler(8.0)
    scaler.clip_grad_norm_(optimizer, 1.0, parameters=parameters[0])
    assert parameters[0].grad.item() == 3.0
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


def test_a_parameter_of_another_optimizer_is_refused() -> None:
    """It could not be unscaled here, so nothing is: the message gives its index and shape."""
    parameters, optimizer = owned(torch.tensor([24.0]))
    others, _ = owned(torch.ones(2, 3))
    scaler = GradScaler(8.0)
    with pytest.raises(ValueError, match=r"parameters\[1\] \(shape \(2, 3\)\)"):
        scaler.clip_grad_norm_(optimizer, 1.0, parameters=[*parameters, *others])
    assert parameters[0].grad.item() == 24.0
    scaler.unscale_(optimizer)
    assert parameters[0].grad.item() == 3.0


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "error", "name"),
    [
        (-1.0, 2.0, ValueError, "max_norm"),
        (math.nan, 2.0, ValueError, "max_norm"),
        (1.0, math.nan, ValueError, "norm_type"),
        ("one", 2.0, (ValueError, TypeError), "one"),
    ],
)
def test_bad_arguments_change_nothing(max_norm: float, norm_type: float, error: type[Exception], name: str) -> None:
    """The error names the argument, also while disabled; the gradients and the stage are as before."""
    parameters, optimizer = owned(torch.tensor([24.0]))
    for scaler in (GradScaler(8.0), GradScaler(8.0, enabled=False)):
        with pytest.raises(error, match=name):
            scaler.clip_grad_norm_(optimizer, max_norm, norm_type)
        assert parameters[0].grad.item() == 24.0


def test_a_float16_gradient_is_refused_by_name_before_any_change() -> None:
    """As unscale_ refuses it: the other gradient is still scaled, and the stage is ready."""
    parameters, optimizer = owned(torch.tensor([24.0]), torch.tensor([24.0], dtype=torch.float16))
    scaler = GradScaler(8.0)
    with pytest.raises(ValueError, match="parameter 1"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert parameters[0].grad.item() == 24.0
    parameters[1].grad = None
    assert scaler.clip_grad_norm_(optimizer, 10.0).item() == 3.0


def test_no_gradients_have_norm_zero() -> None:
    """An optimizer without gradients has norm 0, as in PyTorch, and its step lands."""
    optimizer = torch.optim.SGD([Parameter(torch.ones(2))], lr=1.0)
    scaler = GradScaler()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


def test_all_zero_gradients_have_norm_zero() -> None:
    """Zeros stay zeros and are no overflow."""
    parameters, optimizer = owned(torch.zeros(5), torch.zeros(20000))
    scaler = GradScaler()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    assert parameters[0].grad.tolist() == [0.0] * 5
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_dtypes_and_layouts_mixed(order: float) -> None:
    """float32, float64, bfloat16, a transposed and a sparse gradient in one norm; it is float64 as in PyTorch."""
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.tensor([6.0, 2.0]), (3,), check_invariants=True)
    gradients = [
        torch.tensor([8.0, 16.0]),
        torch.tensor([24.0], dtype=torch.float64),
        torch.tensor([8.0], dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).T,
        sparse,
    ]
    parameters, optimizer = owned(*gradients)
    true = torch.cat([gradient.to_dense().double().flatten() for gradient in gradients]) / 8
    expected = torch.linalg.vector_norm(true, order)
    found = GradScaler(8.0).clip_grad_norm_(optimizer, 1.0, order)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    clipped = torch.cat([parameter.grad.to_dense().double().flatten() for parameter in parameters])
    torch.testing.assert_close(clipped, true / (expected + 1e-6), rtol=2.0**-8, atol=0.0)
    assert [parameter.grad.dtype for parameter in parameters] == [gradient.dtype for gradient in gradients]
    assert parameters[4].grad.is_sparse


def test_float64_is_clipped_in_float64() -> None:
    """A factor rounded to float32 would leave 1e-8 of an error."""
    parameters, optimizer = owned(torch.tensor([3.0, 4.0], dtype=torch.float64) * 3)
    norm = GradScaler(3.0).clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(5.0, rel=1e-15)
    assert parameters[0].grad.tolist() == pytest.approx([3 / 5.000001, 4 / 5.000001], rel=1e-15)


def test_a_shared_gradient_is_divided_once_and_counted_for_each_optimizer() -> None:
    """A second optimizer clips the true value 3, of a gradient that the first had unscaled."""
    shared = Parameter(torch.zeros(1))
    shared.grad = torch.tensor([24.0])
    first, second = torch.optim.SGD([shared], lr=1.0), torch.optim.SGD([shared], lr=1.0)
    scaler = GradScaler(8.0)
    scaler.unscale_(first)
    assert scaler.clip_grad_norm_(second, 1.0).item() == pytest.approx(3.0)
    assert shared.grad.item() == pytest.approx(1.0, rel=1e-5)


def test_disabled_is_pytorchs_clipping(recwarn: pytest.WarningsRecorder) -> None:
    """Gradients and norm are PyTorch's bit for bit, with parameters= and without, its errors too."""
    gradients = random(torch.float32, torch.device("cpu"))
    for chosen in (slice(None), slice(0, 2)):
        parameters, optimizer = owned(*gradients)
        expected, _ = owned(*gradients)
        norm = clip_grad_norm_(expected[chosen], 0.5, 3.0)
        restricted = None if chosen == slice(None) else parameters[chosen]
        assert torch.equal(GradScaler(enabled=False).clip_grad_norm_(optimizer, 0.5, 3.0, parameters=restricted), norm)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(parameters, expected, strict=True))
    _, optimizer = owned(torch.tensor([math.inf]))
    with pytest.raises(RuntimeError, match="non-finite"):
        GradScaler(enabled=False).clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert not recwarn.list


@settings(max_examples=3 * settings.default.max_examples)
@given(
    exponents=st.lists(st.integers(-60, 60), min_size=1, max_size=6),
    scale=st.integers(-40, 40).map(lambda power: 2.0**power),
    max_norm=st.floats(1e-3, 1e3),
    order=st.sampled_from([1.0, 2.0, 4.0, math.inf]),
)
def test_any_magnitudes(exponents: list[int], scale: float, max_norm: float, order: float) -> None:
    """Over 120 powers of two the norm is that of exact arithmetic, or infinite only where float32 cannot hold it."""
    values = [2.0**exponent for exponent in exponents]
    parameters, optimizer = owned(*[torch.tensor([value * scale]) for value in values])
    norm = GradScaler(scale).clip_grad_norm_(optimizer, max_norm, order).item()
    largest = max(values)
    expected = largest if order == math.inf else largest * sum((v / largest) ** order for v in values) ** (1 / order)
    # PyTorch's own float32 powers lose what is below 2⁻¹²⁶ of a true gradient; then no norm is asked of us either.
    if min(values) ** (order if order < math.inf else 1) > 2.0**-120:
        assert norm == pytest.approx(expected, rel=1e-5)
        wanted = [value * min(1.0, max_norm / (expected + 1e-6)) for value in values]
        assert [parameter.grad.item() for parameter in parameters] == pytest.approx(wanted, rel=1e-4)


def test_many_tensors_of_all_sizes() -> None:
    """Ten thousand gradients, small ones joined and large ones alone, have the norm of their number of ones."""
    sizes = itertools.islice(itertools.cycle([1, 64, 300]), 10_000)
    gradients = [torch.full((size,), 4.0) for size in sizes] + [torch.full((2**21 + 5,), 4.0)]
    count = sum(gradient.numel() for gradient in gradients)
    _, optimizer = owned(*gradients)
    assert GradScaler(4.0).clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(math.sqrt(count), rel=1e-6)


def test_no_warning_is_given() -> None:
    """A generator of parameters is read once, and nothing warns."""
    parameters, optimizer = owned(torch.tensor([24.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm = GradScaler(8.0).clip_grad_norm_(optimizer, 1.0, parameters=(p for p in parameters))
    assert norm.item() == pytest.approx(3.0)


def test_a_gradient_that_repeats_counts_as_often(device: torch.device) -> None:
    """As PyTorch's norm does: four times 3, stored once, and 8 in two parameters: √(4 · 9 + 2 · 64)."""
    repeated = torch.full((1,), 3.0 * 4.0, device=device).expand(4)
    shared = torch.full((1,), 8.0 * 4.0, device=device)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4, device=device))], lr=1.0)
    for gradient in (shared, shared):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1, device=device))]})
        optimizer.param_groups[-1]["params"][0].grad = gradient
    optimizer.param_groups[0]["params"][0].grad = repeated
    norm = GradScaler(4.0).clip_grad_norm_(optimizer, 1.0)
    expected = math.sqrt(4 * 9 + 2 * 64)
    assert norm.item() == pytest.approx(expected)
    assert repeated.tolist() == pytest.approx([3.0 / expected] * 4, rel=1e-5)
    assert shared.tolist() == pytest.approx([8.0 / expected], rel=1e-5)


def test_an_error_before_anything_is_divided_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out while the norm is taken leaves gradient and stage as they were: the next try clips."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([24.0, 32.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), GradScaler(8.0)
    with monkeypatch.context() as there, pytest.raises(MemoryError):
        there.setattr(_norms, "power", mock.Mock(side_effect=MemoryError("no memory")))
        scaler.clip_grad_norm_(optimizer, 1e9)
    assert parameter.grad.tolist() == [24.0, 32.0]
    assert scaler.clip_grad_norm_(optimizer, 1e9).item() == 5.0
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


def test_no_parameters_after_an_overflow_have_an_infinite_norm() -> None:
    """What the norm of nothing is tells nobody that the step will be skipped."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), GradScaler(8.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0, parameters=[]).item() == math.inf
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


def test_what_is_no_parameter_is_named() -> None:
    """None in parameters= is a TypeError that says which, and nothing has changed."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([8.0])
    with pytest.raises(TypeError, match=r"parameters\[1\].*None"):
        GradScaler(8.0).clip_grad_norm_(torch.optim.SGD([parameter], lr=1.0), 1.0, parameters=[parameter, None])
    assert parameter.grad.item() == 8.0


@pytest.mark.parametrize("order", [math.inf, 2.0, 1.0])
@pytest.mark.parametrize("values", [(8.0, math.nan), (math.nan, 8.0)])
def test_a_nan_of_another_dtype_is_not_lost(values: tuple[float, float], order: float) -> None:
    """The largest of 8 and NaN is no number, whichever comes first: the step is skipped."""
    parameters, optimizer = owned(torch.tensor([values[0]]), torch.tensor([values[1]], dtype=torch.float64))
    scaler = GradScaler(4.0)
    assert not math.isfinite(scaler.clip_grad_norm_(optimizer, 1.0, order).item())
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert [parameter.item() for parameter in parameters] == [0.0, 0.0]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("chosen", [None, 0, 1, 2])
def test_an_overflow_that_another_optimizer_divided_counts_for_a_clip(bad: int, chosen: int | None) -> None:
    """The first gradient was divided before: one that is infinite skips the step, whatever the norm is taken of."""
    values = [[8.0, 8.0], [8.0, 8.0]]
    values[bad][0] = math.inf
    parameters, optimizer = owned(*map(torch.tensor, values))
    scaler = GradScaler(4.0)
    scaler.unscale_(torch.optim.SGD(parameters[:1], lr=1.0))
    asked = None if chosen is None else parameters[chosen : chosen + 1]
    assert not math.isfinite(scaler.clip_grad_norm_(optimizer, 1.0, parameters=asked).item())
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert [parameter.tolist() for parameter in parameters] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("order", [2.0, 0.0, math.inf])
def test_float64_beside_a_device_that_has_none(device: torch.device, order: float) -> None:
    """The norm lies on the first gradient's device, in the widest dtype that it has; all are divided."""
    if device.type != "mps":
        pytest.skip("only mps has no float64")
    parameters, optimizer = owned(torch.full((2,), 24.0, device=device), torch.full((2,), 32.0, dtype=torch.float64))
    scaler = GradScaler(8.0)
    norm = scaler.clip_grad_norm_(optimizer, 1e9, order)
    assert (norm.device.type, norm.dtype) == ("mps", torch.float32)
    assert norm.item() == pytest.approx({2.0: math.sqrt(50.0), 0.0: 2.0, math.inf: 4.0}[order])
    assert [parameter.grad.tolist() for parameter in parameters] == [[3.0, 3.0], [4.0, 4.0]]
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize("shared", [False, True])
def test_after_an_overflow_the_norm_says_which(shared: bool) -> None:
    """Inf for inf and NaN for NaN, also where a gradient is that of two parameters."""
    for value in (math.inf, math.nan):
        gradient = torch.tensor([8.0, value])
        _, optimizer = owned(gradient, gradient if shared else torch.ones(1))
        assert str(GradScaler(8.0).clip_grad_norm_(optimizer, 1.0).item()) == str(value)
