"""The small network that every layout spreads, its data, and how it trains in one process.

Knows no processes. What ``train_alone`` gives is plain PyTorch without any scaler: the right answer.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, LENGTH, ROWS = 8, 16, 4, 4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    # Plain and distributed tensors together cannot be stepped by PyTorch's batched operators.
    "sgd one by one": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
}


class Net(nn.Module):
    """A norm, a widening and a narrowing layer: what tensor parallel plans speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, length, width)`` to the same shape."""
        return self.down(torch.relu(self.up(self.norm(x))))


def net() -> Net:
    """The network with the same values in every process."""
    torch.manual_seed(0)
    return Net()


def batch(iteration: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one iteration, ``(rows, length, width)`` each."""
    generator = torch.Generator().manual_seed(100 + iteration)
    x, y = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator)
    return x, y


def share(iteration: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """One data-parallel worker's rows of the batch."""
    x, y = batch(iteration)
    return x[part::parts], y[part::parts]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error, in float32."""
    return nn.functional.mse_loss(out.float(), y)


def train_alone(optimizer: str, lands: Iterable[bool]) -> dict[str, Tensor]:
    """Parameters after one process saw whole batches and stepped where ``lands`` says so."""
    model = net()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for iteration, lands_now in enumerate(lands):
        stepper.zero_grad()
        x, y = batch(iteration)
        loss_of(model(x), y).backward()
        if lands_now:
            stepper.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def norm_alone(norm_type: float) -> float:
    """The total norm of the first iteration's gradients in one process."""
    model = net()
    x, y = batch(0)
    loss_of(model(x), y).backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type))
