"""How often the host waits for a device: counted by watching every read of a tensor's value.

On the CPU ``reads`` sees them. On CUDA PyTorch itself raises at every wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from reads import watched
from torch.nn import Parameter

from lucid.amp import GradScaler


def optimizer_over(dtypes: list[torch.dtype], scale: float = 1.0, **options: Any) -> torch.optim.Optimizer:
    """An optimizer with small and large gradients of these dtypes."""
    parameters = []
    for dtype in dtypes:
        for shape in ((3,), (200, 200)):
            parameter = Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.full(shape, scale * 1e-3, dtype=dtype)
            parameters.append(parameter)
    return torch.optim.SGD(parameters, lr=1e-3, **options)


DTYPES = [[torch.float32], [torch.float32, torch.float64, torch.bfloat16]]


def test_the_count_sees_every_way_to_read() -> None:
    """item, float, bool, tolist and numpy are one read each, so the tests below could fail."""
    tensor = torch.ones(3)
    for read in (
        lambda: tensor[0].item(),
        lambda: float(tensor[0]),
        lambda: bool(tensor[0] > 0),
        lambda: tensor.sum().tolist(),
    ):
        with watched() as reads:
            read()
        assert reads.count == 1
    with watched() as reads:
        tensor.tolist()
        tensor.numpy()
    assert reads.count == 2


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("scale", [65536.0, 3.0, 0.5])
@pytest.mark.parametrize("fused", [False, True])
def test_one_read_an_optimizer(dtypes: list[torch.dtype], scale: float, fused: bool) -> None:
    """scale, unscale_ and update read nothing; step reads once, unscaled before or not."""
    if fused and len(dtypes) > 1:
        dtypes = [torch.float32, torch.float64]
    for unscaled in (False, True):
        scaler = GradScaler(scale)
        optimizer = optimizer_over(dtypes, scale, fused=fused)
        warm_up(fused, dtypes)
        with watched() as reads:
            scaler.scale(torch.ones(()))
            if unscaled:
                scaler.unscale_(optimizer)
            assert reads.count == 0
            scaler.step(optimizer)
            assert reads.count == 1
            scaler.update()
        assert reads.count == 1
        assert not scaler.step_was_skipped(optimizer)


def warm_up(fused: bool, dtypes: list[torch.dtype]) -> None:
    """Let what is tried once a process be tried: the kernels' exactness."""
    optimizer = optimizer_over(dtypes, 8.0, fused=fused)
    GradScaler(8.0).step(optimizer)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("scale", [65536.0, 3.0])
@pytest.mark.parametrize("max_norm", [1e-6, 1e6])
def test_clipping_makes_the_read_and_step_none(dtypes: list[torch.dtype], scale: float, max_norm: float) -> None:
    """One read for the norm, the verdict and the other parameters together."""
    for restricted in (False, True):
        scaler, optimizer = GradScaler(scale), optimizer_over(dtypes, scale)
        parameters = optimizer.param_groups[0]["params"]
        with watched() as reads:
            scaler.clip_grad_norm_(optimizer, max_norm, parameters=parameters[:1] if restricted else None)
            assert reads.count == 1
            scaler.step(optimizer)
            scaler.update()
        assert reads.count == 1


@pytest.mark.parametrize("norm_type", [0.0, -1.0, 1.0, 2.0, 3.0, torch.inf])
@pytest.mark.parametrize("shared", [False, True])
def test_clipping_reads_once_for_every_norm(norm_type: float, shared: bool) -> None:
    """Also where the norm is no sum of powers, and where another optimizer has divided a gradient before."""
    scaler, optimizer = GradScaler(8.0), optimizer_over([torch.float32, torch.float64], 8.0)
    if shared:
        scaler.unscale_(torch.optim.SGD(optimizer.param_groups[0]["params"][:1], lr=1.0))
    with watched() as reads:
        scaler.clip_grad_norm_(optimizer, 1e-6, norm_type)
        assert reads.count == 1
        scaler.step(optimizer)
    assert reads.count == 1


def test_no_gradients_no_read() -> None:
    """Without gradients nothing is read, by clipping neither."""
    optimizer = torch.optim.SGD([Parameter(torch.ones(2))], lr=1.0)
    scaler = GradScaler()
    with watched() as reads:
        scaler.step(optimizer)
        scaler.update()
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert reads.count == 0


def test_a_skip_costs_no_further_read() -> None:
    """The causes of a skip are counted on the device and read when asked."""
    optimizer = optimizer_over([torch.float32])
    optimizer.param_groups[0]["params"][0].grad[0] = torch.inf
    scaler = GradScaler()
    with watched() as reads:
        scaler.step(optimizer)
        scaler.update()
    assert scaler.step_was_skipped(optimizer)
    assert reads.count == 1


def test_a_second_look_only_where_the_norm_is_not_finite() -> None:
    """Clipping an overflow may look again, once more, and step then reads nothing."""
    optimizer = optimizer_over([torch.float32])
    optimizer.param_groups[0]["params"][0].grad[0] = torch.inf
    scaler = GradScaler()
    with watched() as reads:
        scaler.clip_grad_norm_(optimizer, 1.0)
        looked = reads.count
        scaler.step(optimizer)
        scaler.update()
    assert looked <= 2
    assert reads.count == looked


def test_an_optimizer_that_is_never_stepped_is_read_by_update() -> None:
    """Unscaled and given up: update makes the one read, for it must know."""
    optimizer = optimizer_over([torch.float32])
    scaler = GradScaler()
    with watched() as reads:
        scaler.unscale_(optimizer)
        assert reads.count == 0
        scaler.update()
    assert reads.count == 1


def test_two_optimizers_read_twice() -> None:
    """One read for each optimizer, none for sharing a gradient."""
    first = optimizer_over([torch.float32])
    second = torch.optim.SGD(first.param_groups[0]["params"][:1], lr=1.0)
    scaler = GradScaler()
    with watched() as reads:
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert reads.count == 2


@contextmanager
def never_waiting() -> Iterator[None]:
    """PyTorch raises where the host waits for CUDA."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: its driver counts the waits")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [65536.0, 3.0, 0.5])
def test_on_cuda_nothing_waits_but_step(scale: float, dtype: torch.dtype) -> None:
    """PyTorch raises at every wait: scale, unscale_ and update make none, and after clipping step makes none."""
    scaler = GradScaler(scale, growth_interval=2)
    parameter = Parameter(torch.zeros(300, device="cuda", dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for clipped in (False, False, True):
        parameter.grad = torch.ones(300, device="cuda", dtype=dtype)
        loss = torch.ones((), device="cuda")
        if clipped:
            scaler.clip_grad_norm_(optimizer, 1.0)
        with never_waiting():
            scaler.scale(loss)
            if clipped:
                scaler.step(optimizer)
            else:
                scaler.unscale_(optimizer)
        if not clipped:
            scaler.step(optimizer)
        with never_waiting():
            scaler.update()
        assert not scaler.step_was_skipped(optimizer)
