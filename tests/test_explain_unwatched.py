"""What lucid's scaler tells of a skip that nobody watched: whether it began in the loss or in the backward."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lucid.amp import GradScaler, diagnosis


class Loop:
    """A training of one layer whose inputs are all the same number."""

    def __init__(self, clears: bool = True) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = GradScaler()
        self.clears = clears

    def step(self, value: float) -> None:
        """One iteration; the loss is alive until its end."""
        if self.clears:
            self.optimizer.zero_grad()
        loss = self.model(torch.full((2, 3), value)).sum() * 1e-3
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def told(self) -> diagnosis.Explanation:
        """What is told of the last skip."""
        return diagnosis.explain(self.scaler)


def test_a_loss_that_is_not_finite_is_the_cause() -> None:
    """A NaN in the data makes the loss NaN: no scale can help, and the text names optimizer and scale."""
    loop = Loop()
    loop.step(1.0)
    loop.step(float("nan"))
    assert loop.told().kind == "loss not finite"
    assert "update 1, scale 65,536" in str(loop.told())
    assert "SGD" in str(loop.told())
    assert "Which layer it was is not known" in str(loop.told())
    assert "Call diagnosis.watch(model, scaler) before training" in str(loop.told())


def test_a_backward_that_overflows_from_a_finite_loss() -> None:
    """The loss is about 1e35; its gradients times 65536 are beyond float32."""
    loop = Loop()
    loop.step(1e38)
    assert loop.told().kind == "backward overflowed"
    assert "at scale 65,536" in str(loop.told())


def test_gradients_that_an_earlier_skip_left_are_not_judged_by_this_loss() -> None:
    """The second loss is finite and its backward too: what is not finite is older, so nothing is claimed."""
    loop = Loop(clears=False)
    loop.step(float("nan"))
    loop.step(1.0)
    assert loop.told().kind == "not known"


def test_after_a_step_that_landed_the_same_tensors_are_judged_again() -> None:
    """Cleared in place, a gradient stays the same tensor; a good update says that it was cleared."""
    loop = Loop(clears=False)
    for value in (float("nan"), 1.0, float("nan")):
        loop.optimizer.zero_grad(set_to_none=False)
        loop.step(value)
    assert loop.told().kind == "loss not finite"


def test_a_loss_that_is_gone_is_not_guessed() -> None:
    """Scaled as an expression and freed, it cannot be looked at: the kind is not known, and no tensor is kept."""
    loop = Loop()
    loop.scaler.scale(loop.model(torch.full((2, 3), float("nan"))).sum() / 2).backward()
    loop.scaler.step(loop.optimizer)
    assert loop.told().kind == "not known"


@pytest.mark.parametrize("bad", [0, 1])
def test_of_several_losses_the_bad_one_is_found(bad: int) -> None:
    """Two micro-batches are accumulated; whichever loss is not finite is the cause."""
    loop = Loop()
    losses = [loop.model(torch.full((2, 3), float("inf") if n == bad else 1.0)).sum() for n in range(2)]
    for loss in losses:
        loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)
    assert loop.told().kind == "loss not finite"


def test_a_fake_loss_is_no_loss_of_the_iteration() -> None:
    """Who estimates memory with fake tensors, and keeps one, is told of the first real skip all the same."""
    loop = Loop()
    with FakeTensorMode():
        fake = torch.ones(2)
        loop.scaler.scale(fake)
    loop.step(float("nan"))
    assert loop.told().kind == "loss not finite"
    assert type(fake) is not torch.Tensor
