"""What happened can be asked: skipped steps, the last update, hooks and the two observer points."""

import dataclasses
import math
import warnings
import weakref
from typing import Any

import pytest
import torch

from lucid.amp import GradScaler, ScaleUpdate


def sgd(gradient: float = 12.0, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of one weight with a gradient."""
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), gradient)
    return torch.optim.SGD([weight], lr=1.0, **settings)


def set_gradient(optimizer: torch.optim.Optimizer, gradient: float) -> None:
    """Give its weight another gradient."""
    optimizer.param_groups[0]["params"][0].grad = torch.full((3,), gradient)


# step_was_skipped.


@pytest.mark.parametrize("fused", [False, True])
def test_the_answer_is_that_of_the_last_step_until_the_next(fused: bool) -> None:
    """It stays through update, unscale_ and further updates, and is replaced by the next step."""
    scaler, optimizer = GradScaler(), sgd(math.inf, fused=fused)
    answers = []
    for gradient in (math.inf, 1.0, math.nan):
        set_gradient(optimizer, gradient)
        scaler.step(optimizer)
        answers.append(scaler.step_was_skipped(optimizer))
        scaler.update()
        answers.append(scaler.step_was_skipped(optimizer))
        scaler.unscale_(optimizer)
        scaler.update()
        answers.append(scaler.step_was_skipped(optimizer))
    assert answers == [True] * 3 + [False] * 3 + [True] * 3


def test_each_optimizer_has_its_own_answer() -> None:
    """Two optimizers of which one overflows."""
    scaler, good, bad = GradScaler(), sgd(), sgd(math.inf)
    scaler.step(bad)
    scaler.step(good)
    assert (scaler.step_was_skipped(good), scaler.step_was_skipped(bad)) == (False, True)


def test_a_step_that_raised_leaves_the_answer() -> None:
    """Refused for its stage, its closure or a dtype, or raised in the optimizer: the answer is the older one."""
    scaler, optimizer = GradScaler(), sgd(math.inf)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already ran"):
        scaler.step(optimizer)
    scaler.update()
    set_gradient(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(TypeError, match="unexpected"):
        scaler.step(optimizer, unexpected=True)
    assert scaler.step_was_skipped(optimizer) is True
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) is False


def test_who_was_never_stepped_here_is_told_what_to_pass() -> None:
    """An optimizer that was only unscaled, a wrapper, or one of another scaler has no answer."""
    scaler, optimizer = GradScaler(), sgd()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"SGD was never stepped.*given to step\(\)"):
        scaler.step_was_skipped(optimizer)
    GradScaler().step(optimizer)
    with pytest.raises(RuntimeError, match="never stepped"):
        scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scheduler_is_gated_by_it(fused: bool) -> None:
    """After three overflows a warm-up is still at its first rate, and PyTorch warns of nothing."""
    optimizer = sgd(math.inf, fused=fused)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    scaler, rates = GradScaler(), []
    for gradient in (math.inf, math.inf, math.inf, 1.0, 1.0):
        set_gradient(optimizer, gradient)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped(optimizer):
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.25, 0.25, 0.25, 0.5, 0.75]


# last_update.


def test_the_last_update_tells_all() -> None:
    """Index, both scales, overflow, and the skipped steps in the order of the optimizers' first calls."""
    scaler, a, b, c = GradScaler(4.0, growth_interval=1), sgd(), sgd(math.inf), sgd()
    assert scaler.last_update is None
    scaler.unscale_(c)
    for optimizer in (b, a, c):
        scaler.step(optimizer)
    assert scaler.last_update is None
    scaler.update()
    assert scaler.last_update == ScaleUpdate(0, 4.0, 2.0, True, (False, True, False))
    scaler.update()
    assert scaler.last_update == ScaleUpdate(1, 2.0, 4.0, False, ())
    scaler.update(32.0)
    assert scaler.last_update == ScaleUpdate(2, 4.0, 32.0, False, ())


def test_an_overflow_that_was_not_stepped_is_told_and_not_called_skipped() -> None:
    """unscale_ found it, update gave the iteration up: no step was asked for, so that none was skipped."""
    scaler, optimizer = GradScaler(4.0), sgd(math.inf)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.last_update == ScaleUpdate(0, 4.0, 2.0, True, (False,))


def test_a_new_scale_does_not_hide_an_overflow() -> None:
    """update(new_scale) sets the scale; the record still tells that a step was skipped."""
    scaler, optimizer = GradScaler(4.0), sgd(math.inf)
    scaler.step(optimizer)
    scaler.update(16.0)
    assert scaler.last_update == ScaleUpdate(0, 4.0, 16.0, True, (True,))


def test_the_record_cannot_be_changed_and_keeps_nobody_alive() -> None:
    """It holds numbers and bools."""
    scaler, optimizer = GradScaler(), sgd()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaler.last_update.scale = 1.0
    with pytest.raises(AttributeError):
        scaler.last_update = None  # type: ignore[misc]
    reference = weakref.ref(optimizer)
    del optimizer
    assert reference() is None


# Hooks.


def test_a_hook_hears_of_each_update_with_the_new_scale_in_force() -> None:
    """hook(scaler, update), in the order of registration, until its handle is removed."""
    scaler, heard = GradScaler(4.0, growth_interval=1), []
    handle = scaler.register_update_hook(lambda s, update: heard.append(("first", s.get_scale(), update.new_scale)))
    scaler.register_update_hook(lambda s, update: heard.append(("second", s is scaler, update is s.last_update)))
    scaler.update()
    assert heard == [("first", 8.0, 8.0), ("second", True, True)]
    handle.remove()
    scaler.update()
    assert heard[2:] == [("second", True, True)]


def test_a_hook_that_raises_does_not_undo_the_update() -> None:
    """Its error comes through; the scale has moved and every optimizer is ready."""
    scaler, optimizer = GradScaler(4.0), sgd(math.inf)

    def hook(*_: Any) -> None:
        raise OSError("no space left")

    with scaler.register_update_hook(hook):
        scaler.step(optimizer)
        with pytest.raises(OSError, match="no space"):
            scaler.update()
    assert scaler.get_scale() == 2.0
    assert scaler.last_update is not None
    scaler.unscale_(optimizer)
    scaler.update()


def test_a_hook_may_remove_itself_and_load_another_scale() -> None:
    """The hooks of this update still run, and what a hook sets stays."""
    scaler, heard = GradScaler(4.0), []

    def once(s: GradScaler, _: ScaleUpdate) -> None:
        handle.remove()
        s.load_state_dict({**s.state_dict(), "scale": 128.0})

    handle = scaler.register_update_hook(once)
    scaler.register_update_hook(lambda s, _: heard.append(s.get_scale()))
    for _ in range(2):
        scaler.update()
    assert heard == [128.0, 128.0]
    assert scaler.get_scale() == 128.0


def test_a_hook_that_cannot_be_called_is_refused_where_it_is_given() -> None:
    """And not at some later update."""
    scaler = GradScaler()
    with pytest.raises(TypeError, match=r"hook must be callable.*'no hook'"):
        scaler.register_update_hook("no hook")  # type: ignore[arg-type]
    scaler.update()


def test_a_refused_update_is_no_update() -> None:
    """No hook runs for it."""
    scaler = GradScaler()
    scaler.register_update_hook(lambda *_: pytest.fail("a hook ran"))
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(-1.0)


# The two observer points.


def test_an_observer_sees_the_outputs_as_they_were_given() -> None:
    """At each scale(), before the optimizer and the user go on; not after its handle is removed."""
    scaler, seen = GradScaler(4.0), []
    handle = scaler._observe_scale(lambda s, outputs: seen.append((s, outputs)))
    loss = torch.ones(())
    scaler.scale([loss])
    handle.remove()
    scaler.scale([loss])
    assert len(seen) == 1
    assert seen[0][0] is scaler
    assert seen[0][1][0] is loss


def test_an_observer_sees_what_a_generator_yields() -> None:
    """A generator yields once: the observer and the user get its tensors all the same, at any depth."""
    scaler, seen, loss = GradScaler(4.0), [], torch.ones(())
    scaler._observe_scale(lambda _, outputs: seen.append(outputs))
    assert scaler.scale({"losses": (loss for _ in range(2))})["losses"] == [torch.tensor(4.0)] * 2
    assert seen[0]["losses"][1] is loss


@pytest.mark.parametrize("fused", [False, True])
def test_an_observer_sees_the_gradients_of_a_skip(fused: bool) -> None:
    """By name and with their true values, before anything can clear them; of a step that lands it hears nothing."""
    scaler, seen = GradScaler(4.0), []
    scaler._observe_skip(lambda s, o, gradients: seen.append((s, o, [(g.name, g.tensor.tolist()) for g in gradients])))
    weight, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([("a.weight", weight), ("b.weight", other)], lr=1.0, fused=fused)
    weight.grad, other.grad = torch.full((2,), 12.0), torch.tensor([math.inf, 12.0])
    scaler.step(optimizer)
    assert seen == [(scaler, optimizer, [("a.weight", [3.0, 3.0]), ("b.weight", [math.inf, 3.0])])]
    assert scaler.step_was_skipped(optimizer)
    scaler.update()
    other.grad = torch.ones(2)
    scaler.step(optimizer)
    assert len(seen) == 1


def test_an_observer_that_raises_leaves_the_step_skipped() -> None:
    """The stage and the answer are settled before anybody is told."""
    scaler, optimizer = GradScaler(4.0), sgd(math.inf)

    def observer(*_: Any) -> None:
        raise OSError("no space left")

    scaler._observe_skip(observer)
    with pytest.raises(OSError, match="no space"):
        scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    scaler.update()
    assert scaler.last_update == ScaleUpdate(0, 4.0, 2.0, True, (True,))


def test_hooks_hear_of_an_update_whose_warning_is_an_error() -> None:
    """With warnings as errors the fall below 1 raises, after the hook was told of it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), torch.inf)
    optimizer, scaler, heard = torch.optim.SGD([parameter], lr=1.0), GradScaler(1.0), []
    scaler.register_update_hook(lambda scaler, update: heard.append(update.new_scale))
    scaler.step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="below 1"):
            scaler.update()
    assert heard == [0.5]


def test_the_last_update_is_one_record() -> None:
    """Who asks twice gets the same object, as a hook does."""
    scaler, heard = GradScaler(4.0), []
    scaler.update()
    assert scaler.last_update is scaler.last_update
    scaler.register_update_hook(lambda _, update: heard.append(update))
    scaler.update()
    assert scaler.last_update is heard[0]
