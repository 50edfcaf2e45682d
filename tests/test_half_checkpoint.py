"""Recomputation under ``torch.utils.checkpoint``: in the first computation's arithmetic, and never an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lucid.amp import autocast
from lucid.amp._half import _products

CONTEXTS = autocast.checkpoint_contexts


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each linear layer that was computed in float32."""
    calls: list[int] = []
    original = _products.Linear.forward

    def forward(*args: Any) -> Tensor:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(_products.Linear, "forward", staticmethod(forward))
    return calls


def model() -> nn.Module:
    """Three linear layers between which something nonlinear is saved."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


def slopes(net: nn.Module, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """The parameters' gradients after a forward in the scope and a backward outside it."""
    net.zero_grad()
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    with autocast("cpu", arithmetic="float32"):
        loss = forward(x).float().square().sum()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def test_recomputes_in_the_same_arithmetic(replaced: list[int]) -> None:
    """With the contexts both computations are replaced, and the gradients are those without a checkpoint."""
    net = model()
    expected = slopes(net, net)
    assert len(replaced) == 3
    found = slopes(net, lambda x: checkpoint(net, x, use_reentrant=False, context_fn=CONTEXTS))
    assert len(replaced) == 9
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_without_the_contexts_it_is_right(reentrant: bool) -> None:
    """Without them there is no error, and the gradients are right."""
    net = model()
    expected = slopes(net, net)
    found = slopes(net, lambda x: checkpoint(net, x, use_reentrant=reentrant))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_without_the_contexts_it_is_native(replaced: list[int]) -> None:
    """A part that could not be recomputed in float32 is not computed so at first either."""
    net = model()
    slopes(net, lambda x: checkpoint(net, x, use_reentrant=False))
    assert replaced == []


@pytest.mark.parametrize("outer", [CONTEXTS, None])
@pytest.mark.parametrize("inner", [CONTEXTS, None])
def test_nested(outer: Any, inner: Any) -> None:
    """A checkpoint inside a checkpoint, each with the contexts or without, is right."""
    net = model()
    expected = slopes(net, net)
    given = {True: {}, False: {"context_fn": CONTEXTS}}

    def inside(x: Tensor) -> Tensor:
        return checkpoint(net[2:], net[:2](x), use_reentrant=False, **given[inner is None])

    found = slopes(net, lambda x: checkpoint(inside, x, use_reentrant=False, **given[outer is None]))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_outside_a_scope_the_contexts_do_nothing() -> None:
    """A model that is sometimes run in float32 may always give them."""
    net, x = model(), torch.randn(3, 4)
    found = checkpoint(net, x, use_reentrant=False, context_fn=CONTEXTS)
    assert torch.equal(found, net(x))
    found.sum().backward()


def test_backward_inside_the_scope() -> None:
    """Recomputation inside the scope that is still open is right, and leaves the scope as it was."""
    net, x = model(), torch.randn(3, 4)
    for contexts in ({"context_fn": CONTEXTS}, {}):
        with autocast("cpu", arithmetic="float32"):
            checkpoint(net, x, use_reentrant=False, **contexts).float().sum().backward()
            assert autocast.is_autocast_enabled()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrence(layer: Any) -> None:
    """A checkpointed recurrent layer has its gradients."""
    net = layer(4, 4)
    expected = slopes(net, lambda x: net(x)[0])
    found = slopes(net, lambda x: checkpoint(lambda x: net(x)[0], x, use_reentrant=False, context_fn=CONTEXTS))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_other_saved_tensor_hooks_are_obeyed(replaced: list[int]) -> None:
    """Hooks that are not a checkpoint's see the half operands, and do not stop the replacement."""
    seen: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.dtype)
        return tensor

    net = nn.Linear(4, 2)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast("cpu", arithmetic="float32"):
        net(x)
    assert (replaced, seen) == ([1], [torch.float16, torch.float16])
