"""What a demo found, as data: a row per way, the gradients' sizes, the moves of the scale.

Knows how several seeds become one row and how it all becomes one JSON object. Refuses to know what it
means in words or pictures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lucid.amp import ScaleUpdate
from lucid.amp.cli.demo.flow import Histogram
from lucid.amp.cli.demo.task import CLASSES, Result, Way

GUESS = math.log(CLASSES)
"""Cross-entropy, in nats, of a network that finds all ten digits equally likely."""


@dataclass(frozen=True)
class Row:
    """One way over all seeds; each number is the median over the seeds.

    Attributes:
        way: the arithmetic.
        results: one a seed.
    """

    way: Way
    results: tuple[Result, ...]

    def middle(self, number: Callable[[Result], float]) -> float:
        """The median over the seeds; NaN where one of them is not a number."""
        numbers = [number(result) for result in self.results]
        return math.nan if any(map(math.isnan, numbers)) else statistics.median(numbers)

    @property
    def loss(self) -> float:
        """Training loss in nats."""
        return self.middle(lambda result: result.loss)

    @property
    def test_accuracy(self) -> float:
        """Share of the test digits read right, 0 to 1."""
        return self.middle(lambda result: result.test_accuracy)

    @property
    def zero_gradients(self) -> tuple[float, ...]:
        """Share of weight gradients that were exactly 0 at step 1, by layer."""
        layers = zip(*(result.zero_gradients for result in self.results), strict=True)
        return tuple(statistics.median(shares) for shares in layers)

    @property
    def steps(self) -> int:
        """Training steps that were made."""
        return statistics.median_low([result.steps for result in self.results])

    @property
    def skipped(self) -> int:
        """Steps skipped."""
        return statistics.median_low([result.skipped for result in self.results])

    @property
    def scale(self) -> float:
        """The scale at the end."""
        return statistics.median_low([result.scale for result in self.results])

    @property
    def frozen(self) -> int:
        """On how many seeds the first layer's weights ended bit for bit as they began."""
        return sum(result.first_layer_moved == 0 for result in self.results)

    @property
    def learnt(self) -> int:
        """On how many seeds the loss ended clearly below a guess: under nine tenths of ln 10."""
        return sum(result.loss < 0.9 * GUESS for result in self.results)

    @property
    def guessing(self) -> int:
        """On how many seeds the loss ended no better than a guess: above 98 % of ln 10, or not finite."""
        return sum(not result.loss < 0.98 * GUESS for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """The row, and under ``runs`` what each seed gave."""
        names = ("loss", "test_accuracy", "zero_gradients", "skipped", "scale", "steps", "learnt")
        row = {"way": self.way.name} | {name: getattr(self, name) for name in names}
        return row | {"runs": [asdict(result) for result in self.results]}


@dataclass
class Record:
    """Everything that one run of the demo found.

    Attributes:
        settings: seed, seeds, steps, device and the version of PyTorch.
        rows: one a way.
        flows: of the first seed at step 1, by way: the sizes of the gradients at three layers.
        losses: of the first seed, by way: the loss at each step, in nats.
        blank: share of the pixels that are 0 in every picture.
        updates: each step of the run that shows the scale at work.
    """

    settings: dict[str, Any]
    rows: tuple[Row, ...] = ()
    flows: dict[Way, tuple[Histogram, ...]] = field(default_factory=dict)
    losses: dict[Way, Sequence[float]] = field(default_factory=dict)
    blank: float = 0.0
    updates: list[ScaleUpdate] = field(default_factory=list)

    def row(self, way: Way) -> Row:
        """The row of one way."""
        return next(row for row in self.rows if row.way == way)

    def as_dict(self) -> dict[str, Any]:
        """One object that JSON can hold; what is not finite becomes null."""
        told = self.settings | {
            "rows": [row.as_dict() for row in self.rows],
            "gradients": [{"way": way.name, **asdict(shown)} for way, flow in self.flows.items() for shown in flow],
            "updates": [update.as_dict() for update in self.updates],
        }
        return _finite(told)  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
