"""How often the gradients are read or written beyond the optimizer's own work, in how many launches and how much room.

A dispatch mode sees every operator. A pass is one read, or one read-and-write, of all gradients; an operator counts
for the share of them that it is given. PyTorch's own scaler is counted beside ours, so that the count is seen to work.
"""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lucid.amp import GradScaler, _torch

VIEWS = {"view", "slice", "detach", "alias", "as_strided", "reshape", "_unsafe_view", "select", "permute", "t"}
ALLOCATIONS = {"empty", "empty_like"}


class Passes(TorchDispatchMode):
    """Counts the bytes of the gradients that operators touch, the operators, and the room that new tensors take."""

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()
        self._storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self._all = sum(gradient.nbytes for gradient in gradients)
        self._touched = 0
        self._room = 0
        self.peak = 0
        self.launches = 0

    @property
    def passes(self) -> float:
        """How often all gradients were read, or read and written."""
        return self._touched / self._all

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; count it unless it is a view or the optimizer's own."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS and not name.startswith("_fused_"):
            self.launches += name not in ALLOCATIONS
            given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            mine = [leaf for leaf in given.values() if leaf.untyped_storage().data_ptr() in self._storages]
            self._touched += sum(tensor.nbytes for tensor in mine) if name not in ALLOCATIONS else 0
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and id(leaf) not in given:
                    self._take(leaf)
        return result

    def _take(self, tensor: Tensor) -> None:
        self._room += tensor.nbytes
        self.peak = max(self.peak, self._room)
        weakref.finalize(tensor, self._give_back, tensor.nbytes)

    def _give_back(self, nbytes: int) -> None:
        self._room -= nbytes


class Still(torch.optim.Optimizer):
    """An optimizer that touches no gradient, so that what is counted is the scaler's."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Do nothing."""


def parameters_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Parameters with gradients of these shapes, of 2 each."""
    parameters = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    return parameters


def counted(parameters: list[Parameter], iteration: Callable[[], object]) -> Passes:
    """What an iteration does to the gradients, at its second run: the first may make what is kept."""
    iteration()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    with Passes([parameter.grad for parameter in parameters if parameter.grad is not None]) as passes:
        iteration()
    return passes


LARGE = [(1000, 500), (700_000,), (300, 40, 30)]
MANY = [(64,)] * 200


@pytest.mark.parametrize("shapes", [LARGE, MANY, LARGE + MANY])
@pytest.mark.parametrize(
    ("scale", "max_norm", "passes"),
    [(65536.0, None, 1), (3.0, None, 2), (0.5, None, 2), (65536.0, 1e-4, 2), (3.0, 1e-4, 2), (3.0, 1e9, 2)],
)
def test_passes_beyond_the_optimizers_own(
    shapes: list[tuple[int, ...]], scale: float, max_norm: float | None, passes: int
) -> None:
    """Without clipping one at powers of two (from 1 on) and two elsewhere, with clipping two."""
    parameters = parameters_of(shapes)
    optimizer, scaler = Still(parameters), GradScaler(scale)

    def iteration() -> None:
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()

    assert counted(parameters, iteration).passes == pytest.approx(passes, abs=0.01)


def test_pytorchs_passes_are_seen() -> None:
    """The count sees PyTorch's: a check-and-unscale, a norm and a multiplication are three at least."""
    parameters = parameters_of(LARGE)
    optimizer, scaler = Still(parameters), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def iteration() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1e-4)
        scaler.step(optimizer)
        scaler.update()

    assert counted(parameters, iteration).passes >= 2.99


@pytest.mark.parametrize(("scale", "inside"), [(65536.0, False), (1.0, False), (3.0, True), (0.5, True)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_divides_in_its_own_kernel_where_that_saves_a_pass(
    scale: float, inside: bool, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass beside the kernel's own, a read where it divides; the gradients hold 2 / scale afterwards."""
    told: list[bool] = []
    step = kind.step.__wrapped__
    monkeypatch.setattr(kind, "step", lambda self: told.append(hasattr(self, "grad_scale")) or step(self))
    monkeypatch.setattr(_torch, "step_is_stock", lambda _: True)
    parameters = parameters_of(LARGE)
    optimizer, scaler = kind(parameters, lr=1e-3, fused=True), GradScaler(scale)

    def iteration() -> None:
        scaler.step(optimizer)
        scaler.update()

    assert counted(parameters, iteration).passes == pytest.approx(1, abs=0.01)
    assert told[-2:] == [inside] * 2
    expected = torch.full((), 2.0) / scaler.get_scale()
    assert all(bool((parameter.grad == expected).all()) for parameter in parameters)


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("scale", "max_norm"), [(65536.0, None), (65536.0, 1e-4), (3.0, 1e-4), (3.0, 1e9)])
def test_launches_do_not_grow_with_the_number_of_parameters(
    scale: float, max_norm: float | None, dtype: torch.dtype
) -> None:
    """As many for 2,000 small tensors as for 20, also where check-and-multiply takes float32 alone, as on some CUDA."""
    launches = []
    for count in (20, 2000):
        parameters = parameters_of([(16,)] * count, dtype)
        optimizer, scaler = Still(parameters), GradScaler(scale)

        def iteration(optimizer: Still = optimizer, scaler: GradScaler = scaler) -> None:
            if max_norm is not None:
                scaler.clip_grad_norm_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()

        launches.append(counted(parameters, iteration).launches)
    assert launches[0] == launches[1] <= 12


@pytest.mark.parametrize("made_as", ["channels_last", "transposed"])
def test_launches_do_not_grow_where_small_gradients_lie_in_another_order(made_as: str, device: torch.device) -> None:
    """A clip takes as many for 200 small tensors in another order of memory as for 20."""
    if device.type == "cpu":
        pytest.skip("on the CPU a copy of a small tensor costs less than to find out how it lies")
    launches = []
    for count in (20, 200):
        gradients = [torch.ones(2, 4, 3, 3, device=device) for _ in range(count)]
        if made_as == "channels_last":
            gradients = [gradient.to(memory_format=torch.channels_last) for gradient in gradients]
        else:
            gradients = [gradient.view(18, 4).t() for gradient in gradients]
        parameters = [Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer, scaler = Still(parameters), GradScaler(1024.0)

        def iteration(optimizer: Still = optimizer, scaler: GradScaler = scaler) -> None:
            scaler.clip_grad_norm_(optimizer, 1e-4)
            scaler.step(optimizer)
            scaler.update()

        launches.append(counted(parameters, iteration).launches)
    assert launches[0] == launches[1] <= 12


def _kernels(scaler: GradScaler, optimizer: Still, clip: bool) -> int:
    """How many kernels one iteration launches on CUDA."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        if clip:
            scaler.clip_grad_norm_(optimizer, 1e-4)
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
    # The driver's and the runtime's calls are recorded, too: on the host.
    ran = [event for event in profile.events() if event.device_type is torch.autograd.DeviceType.CUDA]
    return sum("mem" not in event.name.lower() for event in ran)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: its profiler counts kernels")
@pytest.mark.parametrize("clip", [False, True])
def test_kernels_grow_only_as_pytorchs_batches_do(clip: bool) -> None:
    """A hundred times as many tensors take at most one kernel more for every thirty of them."""
    counts = []
    for count in (20, 2000):
        parameters = [Parameter(torch.zeros(16, device="cuda")) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        scaler, optimizer = GradScaler(), Still(parameters)
        _kernels(scaler, optimizer, clip)
        counts.append(_kernels(scaler, optimizer, clip))
    assert counts[1] - counts[0] <= 2000 / 30


ROOM = 32 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("scale", "bad"), [(3.0, 2.0), (65536.0, 2.0), (0.5, math.inf), (3.0, 1e25)])
@pytest.mark.parametrize("max_norm", [None, 1e-4])
def test_workspace_is_bounded(dtype: torch.dtype, scale: float, bad: float, max_norm: float | None) -> None:
    """At most 32 MiB of new tensors at a time, or the largest gradient's size; on every path, a second look too."""
    parameters = parameters_of([(3000, 3000), *itertools.repeat((1500, 1001), 8), (9000, 1100)], dtype)
    parameters[1].grad = parameters[1].grad.reshape(1001, 1500).T  # type: ignore[union-attr]
    optimizer = Still(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    largest = max(gradient.nbytes for gradient in gradients)
    scaler = GradScaler(scale)
    gradients[0][5, 5] = bad
    with Passes(gradients) as passes:
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.unscale_(optimizer) if max_norm is None else scaler.step(optimizer)
    assert passes.peak <= max(largest, ROOM) + 4096
