"""The demo's task: handwritten digits, a deep sigmoid network, four ways to train it.

Knows the data, the network, one training step and what is measured of it. Refuses to know how often
anything is trained, and how anything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from lucid.amp import GradScaler, autocast

CLASSES = 10
LEARNING_RATE = 3e-3
WIDTH = 64
SIGMOIDS = 6
TRAINED_ON = 1500


@dataclass(frozen=True)
class Way:
    """One way to train: the dtype of the heavy operators, and whether the loss is scaled."""

    name: str
    dtype: torch.dtype
    scaled: bool = False

    @property
    def half(self) -> bool:
        """Whether this way computes in a 16-bit type."""
        return self.dtype is not torch.float32


FLOAT32 = Way("float32", torch.float32)
UNSCALED = Way("float16, no scaling", torch.float16)
SCALED = Way("float16 + GradScaler", torch.float16, scaled=True)
BFLOAT16 = Way("bfloat16, no scaling", torch.bfloat16)
WAYS = (FLOAT32, UNSCALED, SCALED, BFLOAT16)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1797 digits of 8×8 pixels, shuffled once and split.

    Attributes:
        train_x: 1500 × 64, float32, pixels in [0, 1].
        train_y: 1500, int64.
        test_x: 297 × 64.
        test_y: 297.
        blank: share of the 64 pixels that are 0 in every training picture; the first layer's weights
            at those pixels have a gradient of exactly 0 in any arithmetic.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    blank: float


def load_digits(device: torch.device) -> Digits:
    """Read the digits that scikit-learn ships (no download) and put them on the device."""
    from sklearn import datasets  # type: ignore[import-untyped]

    pixels, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = (torch.from_numpy(pixels).float() / 16)[order].to(device)
    y = torch.from_numpy(labels).long()[order].to(device)
    blank = (x[:TRAINED_ON] == 0).all(dim=0).float().mean().item()
    return Digits(x[:TRAINED_ON], y[:TRAINED_ON], x[TRAINED_ON:], y[TRAINED_ON:], blank)


def network(seed: int) -> nn.Sequential:
    """Six times (Linear(64, 64), Sigmoid), then Linear(64, 10), as PyTorch initialises them.

    A sigmoid's slope is at most 1/4, so each of the six makes the gradient smaller on its way back.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for _ in range(SIGMOIDS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


@dataclass(frozen=True)
class Result:
    """What one way gave on one seed.

    Attributes:
        way: the way's name.
        seed: the seed of the initial weights.
        steps: training steps that were made.
        loss: mean cross-entropy on the training set, in nats, before the last step.
        test_accuracy: share of the test digits that were right, 0 to 1.
        zero_gradients: for each of the seven layers, first to last, the share of weight gradients that
            were exactly 0 at step 1.
        first_layer_moved: share of the first layer's weights that differ from their initial values.
        skipped: steps that were skipped because of an overflow.
        scale: the scale at the end; 1.0 without scaling.
    """

    way: str
    seed: int
    steps: int
    loss: float
    test_accuracy: float
    zero_gradients: tuple[float, ...]
    first_layer_moved: float
    skipped: int
    scale: float


class Training:
    """One network trained in one way.

    Args:
        way: the arithmetic.
        digits: the data; its device is where the training runs.
        seed: of the initial weights.
        scaler: another scaler than the default one of a way.
    """

    def __init__(self, way: Way, digits: Digits, seed: int, scaler: GradScaler | None = None) -> None:
        self.way = way
        self.digits = digits
        self.seed = seed
        self.model = network(seed).to(digits.train_x.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.scaler = scaler if scaler is not None else GradScaler(enabled=way.scaled)
        self.losses: list[float] = []
        self.accuracy = float("nan")
        self.skipped = 0
        self.zero_gradients: tuple[float, ...] = ()
        self._initial = self.linears[0].weight.detach().clone()

    @property
    def linears(self) -> list[nn.Linear]:
        """The seven linear layers, first to last."""
        return [module for module in self.model if isinstance(module, nn.Linear)]

    def step(self) -> None:
        """Make one step on the whole training set and remember its loss."""
        self.optimizer.zero_grad()
        with self.scope():
            out = self.model(self.digits.train_x)
        loss = functional.cross_entropy(out.float(), self.digits.train_y)
        self.scaler.scale(loss).backward()
        if not self.losses:
            self.zero_gradients = self._zero_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.step_was_skipped(self.optimizer)
        self.losses.append(loss.item())

    def scope(self) -> autocast:
        """The autocast scope of this way; a disabled one for float32."""
        device = self.digits.train_x.device
        return autocast(device.type, self.way.dtype if self.way.half else None, enabled=self.way.half)

    def test(self) -> None:
        """Measure the accuracy on the test set."""
        with torch.no_grad(), self.scope():
            guesses = self.model(self.digits.test_x).argmax(dim=1)
        self.accuracy = (guesses == self.digits.test_y).float().mean().item()

    def result(self) -> Result:
        """The numbers of this training so far."""
        moved = (self.linears[0].weight != self._initial).float().mean().item()
        return Result(
            way=self.way.name,
            seed=self.seed,
            steps=len(self.losses),
            loss=self.losses[-1],
            test_accuracy=self.accuracy,
            zero_gradients=self.zero_gradients,
            first_layer_moved=moved,
            skipped=self.skipped,
            scale=self.scaler.get_scale(),
        )

    def _zero_gradients(self) -> tuple[float, ...]:
        gradients = [layer.weight.grad for layer in self.linears]
        return tuple((g == 0).float().mean().item() for g in gradients if g is not None)
