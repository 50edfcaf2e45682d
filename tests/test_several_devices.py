"""One optimizer whose gradients lie on several devices, of several dtypes: right numbers, one verdict, one wait.

The devices are CUDA's, beside the CPU; ``set_sync_debug_mode`` tells when the host waits for one.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from reads import waits
from torch import Tensor
from torch.nn import Parameter

from lucid.amp import GradScaler, _causes, diagnosis
from lucid.amp.diagnosis._taps import SeenGradient

SHAPES = ((5, 7), (3,), ())
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(params=["cuda:0 cpu", "cpu cuda:0", "cuda:1 cuda:0", "cuda:0 cpu cuda:1"])
def places(request: pytest.FixtureRequest) -> list[str]:
    """Where the gradients lie, the first one's device first."""
    names: list[str] = request.param.split()
    if sum(name != "cpu" for name in names) > (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        pytest.skip("needs so many CUDA devices")
    return names


def made(places: list[str], scale: float) -> list[Parameter]:
    """Parameters whose gradients are random numbers times the scale."""
    torch.manual_seed(3)
    parameters = []
    for place, dtype, shape in itertools.product(places, DTYPES, SHAPES):
        parameter = Parameter(torch.randn(shape).to(dtype).to(place))
        parameter.grad = (torch.randn(shape) * scale).to(dtype).to(place)
        parameters.append(parameter)
    return parameters


def true(parameters: list[Parameter], scale: float) -> list[Tensor]:
    """What the gradients are without the scale: float64, on the CPU."""
    return [parameter.grad.cpu().double() / scale for parameter in parameters if parameter.grad is not None]


def assert_close(parameters: list[Parameter], expected: list[Tensor]) -> None:
    """Each gradient is the expected one, within its dtype's rounding."""
    for parameter, one in zip(parameters, expected, strict=True):
        found = parameter.grad
        assert found is not None
        rounding = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5, torch.float64: 1e-5}[found.dtype]
        torch.testing.assert_close(found.cpu().double(), one, rtol=rounding, atol=0.0)


@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_a_step_divides_all_and_waits_once(places: list[str], scale: float) -> None:
    """Every device's gradients are divided by the scale; nothing but the one read of the verdict waits."""
    scaler = GradScaler(scale)
    for _ in range(2):  # the first time factors and flags are made
        parameters = made(places, scale)
        optimizer, expected = torch.optim.SGD(parameters, lr=0.5, foreach=False), true(parameters, scale)
        before = [parameter.detach().cpu().clone() for parameter in parameters]
        with waits(1):
            scaler.step(optimizer)
        with waits(0):
            scaler.update()
    assert_close(parameters, expected)
    assert not scaler.step_was_skipped(optimizer)
    assert all(
        not torch.equal(parameter.detach().cpu(), old) for parameter, old in zip(parameters, before, strict=True)
    )


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 0.0, -1.0, -math.inf])
@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_a_clip_takes_the_norm_of_all_and_waits_once(places: list[str], scale: float, order: float) -> None:
    """The norm is that of all devices together and lies where the first gradient does; the step does not wait again."""
    scaler = GradScaler(scale)
    for _ in range(2):
        parameters = made(places, scale)
        optimizer, expected = torch.optim.SGD(parameters, lr=0.5, foreach=False), true(parameters, scale)
        with waits(1):
            norm = scaler.clip_grad_norm_(optimizer, 0.5, order)
        with waits(0):
            scaler.step(optimizer)
            scaler.update()
    norms = torch.stack([torch.linalg.vector_norm(one, order) for one in expected])
    total = torch.linalg.vector_norm(norms, order).item()
    assert norm.item() == pytest.approx(total, rel=2.0**-7)
    assert norm.device == torch.device(places[0])
    assert_close(parameters, [one * min(1.0, 0.5 / total) for one in expected])


@pytest.mark.parametrize("first", ["empty", "repeated", "divided"])
def test_an_odd_gradient_waits_no_more_and_the_norm_lies_with_the_first(places: list[str], first: str) -> None:
    """Without elements, with repetitions, or divided through another optimizer: PyTorch's norm, from one wait."""
    scaler = GradScaler(8.0)
    for _ in range(2):
        gradients = [
            torch.zeros(0, dtype=torch.float64, device=places[0])
            if first == "empty"
            else torch.full((1, 2), 24.0, dtype=torch.float64, device=places[0]).expand(
                1 if first == "divided" else 3, 2
            ),
            *(torch.full((4,), 32.0, device=place) for place in places),
        ]
        parameters = [Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if first == "divided":
            scaler.unscale_(torch.optim.SGD(parameters[:1]))
        with waits(1):
            norm = scaler.clip_grad_norm_(torch.optim.SGD(parameters, foreach=False), math.inf)
        scaler.update()
    repeated = {"empty": 0, "repeated": 6, "divided": 2}[first]
    assert norm.item() == pytest.approx(math.sqrt(repeated * 3.0**2 + len(places) * 4 * 4.0**2))
    assert (norm.device, norm.dtype) == (torch.device(places[0]), torch.float64)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_an_overflow_on_any_device_skips_on_all(places: list[str], scale: float, clips: bool) -> None:
    """Wherever the one element lies that is not finite, no parameter moves and the scale falls."""
    for index in range(len(places) * len(DTYPES) * len(SHAPES)):
        scaler, parameters = GradScaler(scale), made(places, scale)
        broken = parameters[index].grad
        assert broken is not None
        broken.view(-1)[-1] = math.nan
        optimizer = torch.optim.SGD(parameters, lr=0.5, foreach=False)
        before = [parameter.detach().clone() for parameter in parameters]
        if clips:
            assert not math.isfinite(scaler.clip_grad_norm_(optimizer, 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped(optimizer)
        assert scaler.get_scale() == scale / 2
        assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_fused_step_over_kinds_of_devices_divides_before_its_kernels(places: list[str], kind: Any) -> None:
    """Large gradients at a scale that is no power of two: the true values everywhere, and one wait."""
    scaler, size = GradScaler(3.0), 2**17
    for _ in range(2):  # the first time the kernels may be tried
        parameters = [Parameter(torch.zeros(size, device=place)) for place in places]
        for parameter in parameters:
            parameter.grad = torch.full((size,), 6.0, device=parameter.device)
        optimizer = kind(parameters, lr=0.5, fused=True)
        scaler.step(optimizer)
        scaler.update()
    assert all(parameter.grad is not None and parameter.grad.eq(2.0).all() for parameter in parameters)
    assert not scaler.step_was_skipped(optimizer)


def test_what_a_skip_counts_is_divided_by_a_scale_that_lies_elsewhere(places: list[str]) -> None:
    """The largest magnitude of a gradient anywhere, over PyTorch's one scale, which lies on a CUDA device."""
    scale = torch.full((1,), 4.0, device=max(places))
    gradients = []
    for place in places:
        values = torch.tensor([8.0, math.inf], device=place)
        gradients.append(SeenGradient(place, values, values, scale))
    assert [(one.name, one.largest) for one in _causes.count(gradients).read()] == [(place, 2.0) for place in places]


def test_the_norm_lies_with_the_first_parameter_that_is_asked_for(places: list[str]) -> None:
    """In the order in which they are given, as in PyTorch."""
    parameters = made(places, 8.0)
    optimizer, asked = torch.optim.SGD(parameters, foreach=False), parameters[::-1]
    norm = GradScaler(8.0).clip_grad_norm_(optimizer, 1.0, parameters=asked)
    assert norm.device == asked[0].device


def test_a_watched_skip_of_a_fused_optimizer_away_from_the_scale_is_told(places: list[str]) -> None:
    """PyTorch's one scale lies where the loss was; the gradients, whose largest magnitude it divides, anywhere."""
    if "cpu" in places:
        pytest.skip("PyTorch's scaler hands its fused kernels on the CPU a factor that may be late")
    first, *_, last = places
    model = torch.nn.Linear(2, 1).to(last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    told: list[str] = []
    with diagnosis.watch(model, scaler, report=told.append):
        loss = model(torch.tensor([[1.0, math.inf]], device=last)).sum()
        scaler.scale(loss.to(first)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert "weight" in " ".join(map(str, told))
