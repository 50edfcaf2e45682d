"""A forward's surroundings come back, and nothing stays of what happened in them."""

import random

import pytest
import torch
from torch import nn

from lucid.amp import autocast
from lucid.amp.diagnosis._snapshot import Surroundings, unchanged

CPU = [torch.device("cpu")]


def test_the_random_state_comes_back_and_the_present_one_stays() -> None:
    """Inside, the numbers of the moment of the snapshot are drawn again; outside, the row goes on undisturbed."""
    torch.manual_seed(1)
    random.seed(1)
    surroundings = Surroundings(CPU)
    drawn = (torch.rand(2).tolist(), random.random())
    torch.manual_seed(2)
    random.seed(2)
    with surroundings.restored():
        assert (torch.rand(2).tolist(), random.random()) == drawn
    after = (torch.rand(2).tolist(), random.random())
    torch.manual_seed(2)
    random.seed(2)
    assert after == (torch.rand(2).tolist(), random.random())


def test_the_random_state_comes_back_after_an_exception() -> None:
    """An exception inside changes nothing of it."""
    torch.manual_seed(3)
    surroundings = Surroundings(CPU)
    expected = torch.rand(1).item()
    torch.manual_seed(3)
    with pytest.raises(KeyError), surroundings.restored():
        torch.rand(5)
        raise KeyError
    assert torch.rand(1).item() == expected


@pytest.mark.parametrize("enabled", [True, False])
def test_the_autocast_comes_back(enabled: bool) -> None:
    """Inside, operators run in the dtype of then, whatever scope is open now."""
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        surroundings = Surroundings(CPU)
    with torch.autocast("cpu", torch.float16), surroundings.restored():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype is (torch.bfloat16 if enabled else torch.float32)


def test_weights_are_not_left_in_the_autocast_cache() -> None:
    """A replay without gradients inside an open autocast leaves no copy behind that would lose the next gradients."""
    layer = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad(), Surroundings(CPU).restored():
            layer(torch.ones(1, 2))
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None


def test_lucid_s_arithmetic_comes_back() -> None:
    """What lucid's autocast computed in float32 is computed so again, to the last bit."""
    torch.manual_seed(0)
    a, b = torch.randn(1, 512), torch.randn(512, 512)
    with autocast("cpu", arithmetic="float32"):
        surroundings, product = Surroundings(CPU), a @ b
    with surroundings.restored():
        assert torch.equal(a @ b, product)


def test_whether_float16_was_chosen() -> None:
    """The snapshot tells whether autocast was choosing float16."""
    for dtype, expected in ((torch.float16, True), (torch.bfloat16, False)):
        with torch.autocast("cpu", dtype):
            assert Surroundings(CPU).in_float16 is expected
    assert not Surroundings(CPU).in_float16


class Counter(nn.Module):
    """Counts its forwards in an attribute, in a buffer, and in a dict; replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: dict[int, bool] = {}
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        self.calls += 1
        self.seen[self.calls] = True
        self.total += 1
        self.last = x.detach()
        self.extra = x
        return x


def test_a_module_is_as_it_was() -> None:
    """Buffers hold what they held and are the same objects; attributes, dict entries and hooks are undone."""
    model = nn.Sequential(Counter(), nn.BatchNorm1d(2))
    model(torch.ones(3, 2))
    kept = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    keys = set(vars(model[0]))
    with unchanged(model):
        model[0].register_forward_hook(lambda *args: None)
        model(torch.full((3, 2), 7.0))
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {
        name: id(buffer) for name, (buffer, _) in kept.items()
    }
    assert all(torch.equal(buffer, values) for buffer, values in kept.values())
    assert (model[0].calls, list(model[0].seen), set(vars(model[0]))) == (1, [1], keys)
    called = []
    model[0].register_forward_hook(lambda *args: called.append(1))
    model(torch.ones(3, 2))
    assert called == [1]


def test_a_graph_that_waits_does_not_see_the_restoring() -> None:
    """A backward that is still to come, over a buffer that was put back, runs."""
    model = Counter()
    weight = torch.ones((), requires_grad=True)
    waiting = (weight * model.total).sum()
    with unchanged(model):
        model(torch.ones(()))
    waiting.backward()
    assert weight.grad is not None and weight.grad.item() == 0.0
