"""What shows that an optimizer steps on scaled gradients, and that looking for it keeps nothing alive."""

import gc
import weakref

import torch
from torch import Tensor, nn

from lucid.amp.cli.run._bypass import BACKWARDS, TRIES, Suspect


class Held(torch.autograd.Function):
    """The identity, whose node holds a tensor that one can watch."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, held: list[weakref.ref[object]]) -> Tensor:
        """Return x."""
        held.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient."""
        return gradient, None


def suspect_of(*weights: nn.Parameter) -> tuple[Suspect, torch.optim.Optimizer]:
    """An optimizer that has stepped by itself once."""
    optimizer = torch.optim.SGD(weights, lr=0.1)
    suspect = Suspect(optimizer)
    suspect.on_stepped()
    return suspect, optimizer


def test_it_is_shown_by_graph_backward_and_untouched_gradients() -> None:
    """Two scaled losses run backward into two weights, added up, and nothing else: shown, and counted on."""
    weights = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    suspect, optimizer = suspect_of(*weights)
    for factor in (2.0, 3.0):
        loss = (weights[0] * weights[1] * factor).sum()
        suspect.on_scaled([loss])
        (loss * 1024).backward()
    suspect.on_stepped()
    assert (suspect.shown, suspect.times, suspect.name) == (True, 2, "SGD")
    assert optimizer.param_groups


def test_a_weight_without_a_scaled_gradient_leaves_it_open() -> None:
    """One weight whose gradient came from another loss: who knows which of them the step was for."""
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    suspect, optimizer = suspect_of(one, other)
    other.grad = torch.ones(1)
    loss = (one * 2).sum()
    suspect.on_scaled(loss)
    (loss * 1024).backward()
    suspect.on_stepped()
    assert not suspect.shown and optimizer.param_groups


def test_it_is_looked_for_a_few_times_only() -> None:
    """What is not shown in a few iterations costs nothing afterwards: no hook is left."""
    weight = nn.Parameter(torch.ones(1))
    suspect, optimizer = suspect_of(weight)
    for _ in range(TRIES + 2):
        loss = (weight * 2).sum()
        suspect.on_scaled(loss)
        (loss * 1024).backward()
        weight.grad = torch.ones(1)
        suspect.on_stepped()
    assert not suspect.shown
    assert suspect.times == TRIES + 3
    assert not suspect._hooks and not suspect._nodes and optimizer.param_groups


def test_graphs_are_let_go() -> None:
    """A loss that is scaled again and again with no step keeps no more than a few graphs, and then none."""
    weight, held = nn.Parameter(torch.ones(1)), list[weakref.ref[object]]()
    suspect, optimizer = suspect_of(weight)
    for _ in range(BACKWARDS):
        suspect.on_scaled(Held.apply(weight, held).sum())
    assert len([one for one in held if one() is not None]) == BACKWARDS
    suspect.on_scaled(Held.apply(weight, held).sum())
    gc.collect()
    assert [one for one in held if one() is not None] == []
    assert optimizer.param_groups
