"""lucid's scaler behind PyTorch's interface: its arguments, its private names, its place in PyTorch's modules."""

import pickle
from typing import Any

import pytest
import torch
from duck import with_grad
from torch import nn
from torch.amp.grad_scaler import OptState

from lucid.amp import GradScaler
from lucid.amp.cli.run._adapter import PyTorchScaler, ShardedScaler, swapped

INF = float("inf")


def loop(scaler: Any, gradients: list[float], optimizer_class: Any = torch.optim.SGD) -> list[float]:
    """Train one weight with these gradients; the weight after each step."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = optimizer_class([weight], lr=0.5)
    seen = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(weight.item())
    return seen


def test_it_takes_pytorch_arguments_in_pytorch_order() -> None:
    """Device first, then scale, growth, backoff, interval, enabled; each is where PyTorch keeps it."""
    scaler = PyTorchScaler("cpu", 8.0, 4.0, 0.25, 3, True)
    assert isinstance(scaler, GradScaler)
    assert scaler.get_scale() == 8.0
    assert (scaler._device, scaler._init_scale, scaler._enabled) == ("cpu", 8.0, True)
    assert (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == (4.0, 0.25, 3)


def test_sharded_arguments_come_in_the_order_of_fsdp() -> None:
    """FSDP's scaler has backoff before growth."""
    scaler = ShardedScaler("cpu", 8.0, 0.25, 4.0, 3)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.25, 4.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, so nothing is disabled")
def test_cuda_without_cuda_is_disabled_as_in_pytorch() -> None:
    """A script for a GPU runs unscaled on a machine without one, with PyTorch's own warning."""
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = PyTorchScaler()
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_it_trains_as_pytorch_does(optimizer_class: Any) -> None:
    """The same parameters and scales as PyTorch's scaler, step by step, over skips and growth."""
    gradients = [1.0, INF, 0.5, 2.0, float("nan"), 1.0]
    ours, theirs = PyTorchScaler("cpu", 256.0, 2.0, 0.5, 2), torch.amp.GradScaler("cpu", 256.0, 2.0, 0.5, 2)
    assert loop(ours, gradients, optimizer_class) == loop(theirs, gradients, optimizer_class)
    assert ours.state_dict() == theirs.state_dict()


def unscaled(gradient: float) -> tuple[PyTorchScaler, torch.optim.Optimizer, nn.Parameter]:
    """A scaler, an optimizer and a weight, just unscaled."""
    scaler = PyTorchScaler("cpu", 4.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * gradient).sum()).backward()
    scaler.unscale_(optimizer)
    return scaler, optimizer, weight


@pytest.mark.parametrize(("gradient", "flag"), [(1.0, 0.0), (INF, 1.0)])
def test_flags_tell_an_overflow(gradient: float, flag: float) -> None:
    """After ``unscale_`` there is a flag a device; before it there is none, as in PyTorch."""
    scaler, optimizer, _ = unscaled(gradient)
    flags = scaler._found_inf_per_device(optimizer)
    assert {device.type: value.item() for device, value in flags.items()} == {"cpu": flag}
    scaler.update()
    assert scaler._found_inf_per_device(optimizer) == {}


def test_a_flag_that_a_trainer_sets_skips_the_step() -> None:
    """Ranks that agree by reducing the flags in place are obeyed: skipped here, and the scale backs off."""
    scaler, optimizer, weight = unscaled(1.0)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1.0
    assert scaler.get_scale() == 2.0


def test_a_check_before_unscaling_is_obeyed_too() -> None:
    """An optimizer that asks for the check itself, on gradients still scaled, gets the same answer."""
    scaler = PyTorchScaler("cpu", 4.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * 1.0).sum()).backward()
    (flag,) = scaler._check_inf_per_device(optimizer).values()
    assert flag.item() == 0.0
    scaler.step(optimizer)
    assert weight.item() == 0.0


def test_sparse_gradients_are_checked() -> None:
    """The values of a sparse gradient are what is looked at."""
    table = nn.Embedding(3, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    (table(torch.tensor([1])) * INF).sum().backward()
    (flag,) = PyTorchScaler("cpu")._check_inf_per_device(optimizer).values()
    assert flag.item() == 1.0


def test_the_table_of_states_follows_the_stages() -> None:
    """What trainers read by the optimizer's id is PyTorch's own stage, and an unknown one is ready."""
    scaler, optimizer, _ = unscaled(INF)
    states = scaler._per_optimizer_states
    assert states[id(optimizer)]["stage"] is OptState.UNSCALED
    assert [flag.item() for flag in states[id(optimizer)]["found_inf_per_device"].values()] == [1.0]
    scaler.step(optimizer)
    assert states[id(optimizer)]["stage"] is OptState.STEPPED
    assert (len(states), list(states)) == (1, [id(optimizer)])
    assert dict(states[-1]) == {"stage": OptState.READY, "found_inf_per_device": {}}
    assert -1 not in states
    scaler.update()
    assert len(states) == 0


def test_a_stage_that_is_set_back_lets_unscale_again() -> None:
    """Trainers that set the stage to READY, or drop the row, may unscale once more."""
    scaler, optimizer, weight = unscaled(1.0)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states.pop(id(optimizer), None)
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    # lucid divides a gradient once an iteration, whatever it is told.
    assert weight.grad.item() == 1.0


def test_scale_and_count_are_tensors_that_can_be_set() -> None:
    """``_scale`` and ``_growth_tracker`` read as PyTorch's tensors, and an assignment takes effect."""
    scaler = PyTorchScaler("cpu", 4.0)
    loop(scaler, [1.0])
    assert scaler._growth_tracker.dtype is torch.int32
    assert [t.item() for t in scaler._check_scale_growth_tracker("update")] == [4.0, 1]
    assert scaler._get_scale_async().item() == 4.0
    scaler._scale = torch.tensor(32.0)
    scaler._growth_tracker = torch.tensor(7, dtype=torch.int32)
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (32.0, 7)
    assert scaler._get_growth_tracker() == 7


def test_it_is_pickled_between_iterations() -> None:
    """A copy has the device, the settings and the scale, and works."""
    scaler = PyTorchScaler("cpu", 4.0, growth_interval=2)
    loop(scaler, [1.0])
    copied = pickle.loads(pickle.dumps(scaler))
    assert (copied._device, copied.state_dict()) == ("cpu", scaler.state_dict())
    assert loop(copied, [1.0]) == [0.5]
    assert copied.get_scale() == 8.0


def test_it_stands_in_pytorch_places_and_leaves_them() -> None:
    """Every name under which PyTorch shows a scaler gives lucid's for the block, and is itself again after it."""
    before = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)
    with swapped():
        for scaler in (torch.amp.GradScaler("cpu", 8.0), torch.GradScaler("cpu", 8.0), torch.cpu.amp.GradScaler(8.0)):
            assert isinstance(scaler, GradScaler)
            assert isinstance(scaler, torch.amp.GradScaler)
            assert scaler.get_scale() == 8.0
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        assert ShardedGradScaler is ShardedScaler
    assert (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler) == before
    assert not issubclass(torch.GradScaler, GradScaler)


def test_a_step_that_lands_after_its_stage_was_set_back_was_not_skipped() -> None:
    """Skipped, set back to ready by a trainer, and stepped again by 12 / 4 = 3: the record tells of the second."""
    weight = with_grad(torch.tensor([float("inf")]))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), PyTorchScaler("cpu", 4.0)
    scaler.step(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    weight.grad = torch.tensor([12.0])
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == -3.0
    assert scaler.last_update is not None
    assert scaler.last_update.skipped == (False,)


def test_a_stage_that_is_set_to_unscaled_is_believed() -> None:
    """In the second iteration too: after a step by 4 / 4, gradients of 3 are stepped by as they are, to −1 − 3."""
    weight = with_grad(torch.tensor([4.0]))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), PyTorchScaler("cpu", 4.0)
    scaler.step(optimizer)
    scaler.update()
    weight.grad = torch.tensor([3.0])
    scaler._check_inf_per_device(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
    scaler.step(optimizer)
    assert weight.grad.item() == 3.0
    assert weight.item() == -4.0
