"""Gradients that are spread over a mesh, here of one process; meshes of several have tests of their own."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lucid.amp import GradScaler


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A mesh of this one process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sgd(*parameters: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Gradient descent with a learning rate of 1."""
    return torch.optim.SGD(parameters, lr=1.0)


def plain_parameter() -> torch.nn.Parameter:
    """One that is not spread, with a gradient of 12."""
    made = torch.nn.Parameter(torch.zeros(3))
    made.grad = torch.full((3,), 12.0)
    return made


def weight(mesh: Any, value: float) -> Any:
    """A sharded parameter with a sharded gradient."""
    made = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    made.grad = distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)])
    return made


def test_it_is_divided_by_its_local_tensor(mesh: Any) -> None:
    """The gradient stays a DTensor, beside plain ones in one optimizer, and is divided once for two optimizers."""
    scaler, spread, plain = GradScaler(4.0), weight(mesh, 12.0), plain_parameter()
    scaler.unscale_(sgd(spread, plain))
    scaler.unscale_(sgd(spread))
    assert isinstance(spread.grad, DTensor)
    assert spread.grad.to_local().tolist() == [[3.0, 3.0]] * 4
    assert plain.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_each_is_divided_while_its_sum_is_on_its_way(mesh: Any, scale: float) -> None:
    """What a collective returns has no address until it is awaited: several such gradients are no memory in common."""
    weights = [weight(mesh, 12.0) for _ in range(3)]
    for made in weights:
        summed = all_reduce(torch.full((4, 2), 12.0), "sum", mesh)
        made.grad = DTensor.from_local(summed, mesh, [Shard(0)], run_check=False)
    GradScaler(scale).unscale_(sgd(*weights))
    assert [made.grad.to_local().tolist() for made in weights] == [[[12.0 / scale] * 2] * 4] * 3


def test_an_overflow_in_it_skips(mesh: Any) -> None:
    """An inf in the local shard is found."""
    scaler, spread = GradScaler(4.0), weight(mesh, 12.0)
    spread.grad.to_local()[3, 1] = math.inf
    optimizer = sgd(spread)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert spread.to_local().abs().max().item() == 0.0


def test_a_loss_that_is_spread_is_scaled(mesh: Any) -> None:
    """scale() takes a DTensor and hands one back."""
    spread = weight(mesh, 12.0)
    loss = GradScaler(8.0).scale((spread * 2.0).sum())
    assert isinstance(loss, DTensor)
    loss.backward()
    assert spread.grad.full_tensor().tolist() == [[28.0, 28.0]] * 4  # 12 + 2 · 8
