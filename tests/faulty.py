"""Ten small trainings, each with one fault, and what a diagnosis should say of each.

Knows models, batches and loops that go wrong on purpose. Each is a function of a scaler, and of what to do with
the model before it trains; it trains until its fault has shown. Knows nothing of how a fault is found.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Watching = Callable[[nn.Module], Any]


def _nothing(model: nn.Module) -> None:
    """Watch nothing."""


class Block(nn.Module):
    """Adds ``gain`` times a linear layer to its input."""

    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        """Return x + gain · linear(x)."""
        return x + self.gain * self.linear(x)


class Norm(nn.Module):
    """Divides each row by its root mean square; its eps of 1e-8 is zero in float16."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square."""
        return x / ((x * x).mean(-1, keepdim=True) + 1e-8).sqrt()


def perceptron(width: int = 16) -> nn.Sequential:
    """Three linear layers with ReLU between."""
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def batch(number: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    """A batch of inputs and the targets they determine."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))
    return x, x.sum(1, keepdim=True)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """The model's output under float16 autocast."""
    with torch.autocast("cpu", torch.float16):
        output: Tensor = model(x)
    return output


def train(
    model: nn.Module,
    scaler: Any,
    *,
    steps: int = 10,
    lr: float = 0.01,
    data: Callable[[int], tuple[Tensor, Tensor]] = batch,
    loss: Callable[[Tensor, Tensor], Tensor] = lambda out, y: nn.functional.mse_loss(out.float(), y),
    clear: bool = True,
) -> None:
    """Train as anybody would."""
    optimizer = torch.optim.SGD(model.named_parameters(), lr=lr)
    for step in range(steps):
        x, y = data(step)
        if clear:
            optimizer.zero_grad()
        scaler.scale(loss(forward(model, x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def nan_in_the_data(scaler: Any, watching: Watching = _nothing) -> None:
    """A NaN in the batch of step 7."""
    torch.manual_seed(0)
    model = perceptron()
    watching(model)

    def data(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        if step == 7:
            x[3, 2] = torch.nan
        return x, y

    train(model, scaler, steps=8, data=data)


def huge_activation(scaler: Any, watching: Watching = _nothing) -> None:
    """An activation beyond 65504 in the third block."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(8, gain) for gain in (1.0, 1.0, 1e5, 1.0)), nn.Linear(8, 1))
    watching(model)
    train(model, scaler, steps=3)


def diverging_learning_rate(scaler: Any, watching: Watching = _nothing) -> None:
    """A learning rate that diverges."""
    torch.manual_seed(0)
    model = perceptron()
    watching(model)
    train(model, scaler, lr=30.0)


def scale_too_high(scaler: Any, watching: Watching = _nothing) -> None:
    """A scale that is too high."""
    torch.manual_seed(0)
    model = perceptron()
    watching(model)
    train(model, scaler, steps=3)


def never_cleared(scaler: Any, watching: Watching = _nothing) -> None:
    """Gradients that are never cleared: the first overflow stays."""
    torch.manual_seed(0)
    model = perceptron()
    watching(model)
    train(model, scaler, clear=False)


def tiny_eps(scaler: Any, watching: Watching = _nothing) -> None:
    """An eps of 1e-8, which is zero in half precision, and a row of zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), Norm(), nn.Linear(16, 1))
    model[0].bias.data.zero_()
    watching(model)

    def data(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        x[0] = 0.0
        return x, y

    train(model, scaler, steps=2, data=data)


def sum_loss(scaler: Any, watching: Watching = _nothing) -> None:
    """A sum instead of a mean, over a large batch."""
    torch.manual_seed(0)
    model = perceptron()
    watching(model)
    train(
        model,
        scaler,
        steps=2,
        lr=1e-6,
        data=lambda step: batch(step, 4096),
        loss=lambda out, y: (out.float() - y).square().sum(),
    )


def log_of_zero(scaler: Any, watching: Watching = _nothing) -> None:
    """A cross-entropy written by hand, whose softmax has become zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    watching(model)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return -(out.float() * 1e4).softmax(1).log().mean()

    train(model, scaler, steps=2, loss=loss)


def stray_half_layer(scaler: Any, watching: Watching = _nothing) -> None:
    """One layer in float16 among float32 ones: the scaler raises."""
    torch.manual_seed(0)
    model = perceptron()
    model[2].half()
    watching(model)
    train(model, scaler, steps=2)


def dead_relu(scaler: Any, watching: Watching = _nothing) -> None:
    """A ReLU that is never active: every gradient is exactly zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
    model[0].bias.data.fill_(-100.0)
    watching(model)
    train(model, scaler, steps=5)


class Faulty(NamedTuple):
    """One training, and the right answer: kind, reason, where the fault lies; the scale it begins with."""

    train: Callable[..., None]
    kind: str
    reason: str | None
    where: tuple[str, ...]
    init_scale: float = 1024.0
    raises: type[Exception] | None = None


FAULTY: dict[str, Faulty] = {
    each.train.__name__: each
    for each in (
        Faulty(nan_in_the_data, "loss not finite", "the batch itself is not finite", ("0",)),
        Faulty(huge_activation, "loss not finite", "an output beyond float16's 65504", ("2",)),
        Faulty(diverging_learning_rate, "loss not finite", "the weights have grown beyond use", ("0",)),
        Faulty(scale_too_high, "backward overflowed", None, ("4",), 2.0**40),
        Faulty(never_cleared, "gradients never cleared", None, ("4",), 2.0**30),
        Faulty(tiny_eps, "loss not finite", "finite in float32, not in float16", ("3",)),
        Faulty(sum_loss, "backward overflowed", None, ("4",), 65536.0),
        Faulty(log_of_zero, "loss not finite", "made by the loss function, outside the model", ("the loss function",)),
        Faulty(stray_half_layer, "float16 parameter", None, ("2",), raises=ValueError),
        Faulty(dead_relu, "gradients exactly zero", "a module puts out nothing but zeros", ("1",)),
    )
}
