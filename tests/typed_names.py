"""A user's program under the specification's names, for type checkers: every line of it must be understood.

It is never run. mypy and pyright read it in their strictest modes; tests/test_typing.py asks them.
"""

import torch

import lucid
import lucid.nn as nn
import lucid.nn.functional as F
import lucid.optim as optim
from lucid import GradScaler, amp, autocast
from lucid.nn import init
from lucid.nn.attention import SDPBackend, sdpa_kernel
from lucid.nn.parameter import Parameter
from lucid.nn.utils import clip_grad_norm_
from lucid.nn.utils.rnn import pad_sequence
from lucid.optim.lr_scheduler import StepLR
from lucid.optim.swa_utils import AveragedModel


class Net(nn.Module):
    """A model by names of ``lucid.nn``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.gain = Parameter(lucid.ones(width))
        init.zeros_(self.first.bias)

    def forward(self, x: lucid.Tensor) -> lucid.Tensor:
        """Two operators of torch's."""
        return F.gelu(self.first(x)) * self.gain


def train(steps: int, device: lucid.device) -> float:
    """The specification's loop, each name of which has torch's type."""
    model = Net(4).to("metal", lucid.float32)
    optimizer: torch.optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    schedule = StepLR(optimizer, step_size=10)
    average = AveragedModel(model)
    scaler: amp.GradScaler = GradScaler(init_scale=2.0**12)
    x: torch.Tensor = lucid.randn(8, 4, device=device)
    y = lucid.zeros_like(x, device="metal")
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(), sdpa_kernel(SDPBackend.MATH):
            loss: lucid.Tensor = nn.MSELoss()(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm: torch.Tensor = clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped(optimizer):
            schedule.step()
            average.update_parameters(model)
        print(norm.item(), pad_sequence([x, y]).shape)
    return scaler.get_scale()


def load(path: str) -> lucid.Size:
    """Names beside the training: files, devices, dtypes, submodules of torch."""
    state = lucid.load(path, map_location="metal")
    kind: torch.dtype = lucid.bfloat16 if lucid.cuda.is_available() else lucid.float16
    with lucid.no_grad(), lucid.device("metal"):
        weights: torch.Tensor = lucid.cat([lucid.eye(3, dtype=kind), lucid.as_tensor(state["weights"])])
    assert isinstance(weights.device, lucid.device)
    return lucid.stack([weights, lucid.matmul(weights, weights.T)]).shape
