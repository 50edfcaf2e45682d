"""A fused optimizer that raises inside its own step: every gradient is divided once all the same.

Each test runs twice: with the division inside the optimizer's kernel, and with the division before it.
"""

from typing import Any

import numpy as np
import pytest
import torch

from lucid.amp import GradScaler, _fused

# With a momentum each of them reads its state in every step.
CLASSES: dict[type[torch.optim.Optimizer], dict[str, float]] = {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.Adam: {},
    torch.optim.AdamW: {},
    torch.optim.Adagrad: {},
}


@pytest.fixture(params=[True, False], ids=["in the kernel", "before it"], autouse=True)
def in_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients are divided, whatever their size and the scale."""
    monkeypatch.setattr(_fused, "saves", lambda *_: request.param)


@pytest.fixture(params=CLASSES, ids=lambda made: made.__name__)
def make(request: pytest.FixtureRequest) -> Any:
    """A fused optimizer of each class that has one."""
    return lambda parameters: request.param(parameters, lr=0.5, fused=True, **CLASSES[request.param])


def weight(gradient: np.ndarray) -> torch.nn.Parameter:
    """A parameter with this gradient."""
    made = torch.nn.Parameter(torch.ones(len(gradient)))
    made.grad = torch.from_numpy(gradient.copy())
    return made


class Broken(dict[str, Any]):
    """The state of a parameter, on a disk that cannot be read."""

    def get(self, *_: Any) -> Any:
        """Raise, whatever is asked for."""
        raise OSError("broken")

    __getitem__ = __contains__ = __len__ = get


RAISES = {
    "before the first group": lambda first, second: [first, second],
    "between the groups": lambda first, second: [second],
}


@pytest.fixture(params=["ordinary", "huge", "tiny", "one zero"])
def magnitude(request: pytest.FixtureRequest) -> float:
    """Gradients whose squares float32 holds, or overflow, or underflow in it."""
    return {"ordinary": 12.0, "huge": 2.0**120, "tiny": 2.0**-100, "one zero": 0.0}[request.param]


@pytest.mark.parametrize("scale", [4.0, 3.0, 0.5])
@pytest.mark.parametrize("where", RAISES)
def test_a_step_that_raises_leaves_true_gradients(make: Any, where: str, magnitude: float, scale: float) -> None:
    """Some groups were stepped and some not: each gradient is divided once, and the next try divides none again."""
    values = np.array([magnitude, 12.0 if magnitude == 0.0 else magnitude], dtype=np.float32)
    first, second = weight(values), weight(values * 2)
    optimizer = make([{"params": [first]}, {"params": [second]}])
    for broken in RAISES[where](first, second):
        optimizer.state[broken] = Broken()
    scaler = GradScaler(scale)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            scaler.step(optimizer)
        assert first.grad.tolist() == (values / np.float32(scale)).tolist()
        assert second.grad.tolist() == (values * 2 / np.float32(scale)).tolist()
    with pytest.raises(RuntimeError, match="never stepped"):
        scaler.step_was_skipped(optimizer)


def test_a_hook_that_raises_after_the_step_leaves_true_gradients(make: Any, magnitude: float) -> None:
    """The kernel has divided: nothing is divided again."""
    values = np.array([magnitude, 1.0], dtype=np.float32)
    held, scaler = weight(values), GradScaler(4.0)
    optimizer = make([held])

    def hook(*_: Any) -> None:
        raise OSError("no space left")

    optimizer.register_step_post_hook(hook)
    with pytest.raises(OSError, match="no space"):
        scaler.step(optimizer)
    assert held.grad.tolist() == (values / 4.0).tolist()
