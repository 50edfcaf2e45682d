"""What is counted in the gradients of a skipped step.

Every expected number is counted by hand.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lucid.amp import GradScaler
from lucid.amp._causes import NonFinite, count
from lucid.amp._gradients import Gradient
from lucid.amp.diagnosis import _taps

INF, NAN = math.inf, math.nan
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Operators(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run it."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def gradient(name: str, values: Tensor) -> Gradient:
    """A gradient of a parameter of its own shape."""
    return Gradient(name, torch.zeros(values.shape, device=values.device), values)


def test_inf_and_nan_are_counted_and_the_finite_ones_left_out(device: torch.device) -> None:
    """A gradient that holds inf or NaN is told with both counts and its largest finite magnitude."""
    counts = count(
        [
            gradient("a", torch.tensor([[1.0, -INF, INF], [NAN, -7.0, 2.0]], device=device)),
            gradient("b", torch.tensor([3.0], device=device)),
            gradient("c", torch.tensor([NAN, NAN], device=device)),
        ]
    )
    first, second = counts.read()
    assert (first, second) == (NonFinite("a", (2, 3), 2, 1, 7.0), NonFinite("c", (2,), 0, 2, 0.0))
    assert str(second.largest) == "0.0"  # and not -0.0


def test_what_changes_afterwards_does_not_count(device: torch.device) -> None:
    """The counts are those of the moment of the skip, also where they are read after the gradients were cleared."""
    values = torch.tensor([INF, 2.0], device=device)
    counts = count([gradient("a", values)])
    values.zero_()
    assert counts.read() == (NonFinite("a", (2,), 1, 0, 2.0),)


def test_reading_twice_gives_the_same(device: torch.device) -> None:
    """The answer is kept."""
    counts = count([gradient("a", torch.tensor([INF], device=device))])
    assert counts.read() is counts.read()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_tells_its_largest_finite_magnitude(dtype: torch.dtype) -> None:
    """A finite largest number of the dtype is not mistaken for inf, beside a gradient of another dtype either."""
    largest, beside = torch.finfo(dtype).max, gradient("b", torch.tensor([NAN, 0.5]))
    counts = count([gradient("a", torch.tensor([-largest, INF], dtype=dtype)), beside])
    assert counts.read() == (NonFinite("a", (2,), 1, 0, largest), NonFinite("b", (2,), 0, 1, 0.5))


def test_nothing_and_emptiness() -> None:
    """No gradients, and a gradient without elements, are nothing that is not finite."""
    assert count([]).read() == ()
    assert count([gradient("a", torch.zeros(0, 3))]).read() == ()


def test_more_than_float32_can_count() -> None:
    """2²⁴ + 1 NaN are counted one by one: a float32 would lose the last."""
    many = 2**24 + 1
    counts = count([Gradient("a", torch.zeros(1).expand(many), torch.full((many,), NAN, dtype=torch.float16))])
    assert counts.read()[0].nan == many


def test_a_gradient_that_is_still_scaled_is_told_as_the_true_one() -> None:
    """Where a scale is given beside the values, the largest magnitude is divided by it."""
    values = torch.tensor([INF, 12.0])
    counts = count([_taps.SeenGradient("a", torch.zeros(2), values, torch.tensor(4.0))])
    assert counts.read() == (NonFinite("a", (2,), 1, 0, 3.0),)


def test_the_launch_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching the counts waits for no device; reading them does, a few times however many gradients there are."""
    reads: list[str] = []
    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "numpy"):
        real = getattr(torch.Tensor, name)

        def read(self: Tensor, *args: object, name: str = name, real: object = real) -> object:
            reads.append(name)
            return real(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, read)
    counts = count([gradient(str(number), torch.tensor([INF, 1.0])) for number in range(50)])
    assert reads == []
    assert len(counts.read()) == 50
    assert len(reads) == 2


def test_a_step_that_lands_counts_nothing_and_a_skip_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler launches the counts in ``step`` once it knows of the skip, and at no other time."""
    launched = []
    monkeypatch.setattr(
        "lucid.amp._causes.count", lambda gradients: launched.append(len(gradients)) or count(gradients)
    )
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), GradScaler(init_scale=4.0)
    for factor in (1.0, INF, 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert launched == [1]


@given(st.lists(st.tuples(st.sampled_from([0, 1, 3, 40]), st.sampled_from(DTYPES), st.integers(0, 2**16)), max_size=30))
def test_many_together_are_told_as_each_alone(kinds: list[tuple[int, torch.dtype, int]]) -> None:
    """Sizes and dtypes in any order, empty ones between: what NumPy counts in each."""
    odd = [INF, -INF, NAN, 0.0, 1.5, -2.5, 1e4]
    values = [
        torch.tensor([odd[n] for n in np.random.default_rng(seed).integers(0, 7, size)], dtype=dtype)
        for size, dtype, seed in kinds
    ]
    expected = []
    for place, tensor in enumerate(values):
        array = tensor.double().numpy()
        inf, nan = int(np.isinf(array).sum()), int(np.isnan(array).sum())
        if inf or nan:
            largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
            expected.append(NonFinite(str(place), tuple(tensor.shape), inf, nan, largest))
    assert count([gradient(str(place), tensor) for place, tensor in enumerate(values)]).read() == tuple(expected)


def test_many_small_gradients_share_their_launches() -> None:
    """As many operators for 2,000 as for 20, and few of them."""
    launched = []
    for many in (20, 2000):
        gradients = [gradient(str(place), torch.full((16,), INF)) for place in range(many)]
        with Operators() as operators:
            counts = count(gradients)
        launched.append(operators.count)
        assert {(one.inf, one.nan) for one in counts.read()} == {(16, 0)}
    assert launched[0] == launched[1] <= 25
