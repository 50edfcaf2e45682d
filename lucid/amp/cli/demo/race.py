"""Four trainings side by side, a step of each in turn.

Knows the order of the steps, when tests are taken, what is looked at in the first step, and when a slow
machine has seen enough. Refuses to know how a step is made and how it is shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from lucid.amp.cli.demo.flow import Histogram, caught, histogram
from lucid.amp.cli.demo.task import UNSCALED, WAYS, Digits, Training, Way

STEPS = 600
SHOWN_BY = 150
"""Training steps after which a network that gets no gradient has visibly learnt nothing."""

LAYERS = (1, 4, 7)
"""The layers whose gradients are looked at: first, middle and last."""

TESTS = 20


class Race:
    """The four ways on one seed.

    Args:
        digits: the data.
        seed: of the initial weights, the same for all four.
        steps: training steps of each way.
        patience: seconds; None waits for all steps. PyTorch's own half arithmetic on a CPU can be
            twenty times slower than float32. Where that would take longer than this, the way that learns
            nothing stops at step 150, and all stop when the time is up.
    """

    def __init__(self, digits: Digits, seed: int, steps: int, patience: float | None = None) -> None:
        self.seed = seed
        self.steps = steps
        self.patience = patience
        self.round = 0
        self.trainings = [Training(way, digits, seed) for way in WAYS]
        self.flows: dict[Way, tuple[Histogram, ...]] = {}
        self._resting: list[Way] = []
        self._begun = time.monotonic()

    def rounds(self) -> Iterator[int]:
        """Make one step of each way, then give the number of steps made; until all are made."""
        self._begun = time.monotonic()
        while self.round < self.steps and not self._out_of_patience():
            self.round += 1
            for training in self._running():
                self._step(training)
            if self.round % max(self.steps // TESTS, 1) == 0:
                self._test(self._running())
            if self.round == SHOWN_BY and self._too_slow():
                self._test(self._running())
                self._resting.append(UNSCALED)
            yield self.round
        self._test(self._running())

    def steps_made(self) -> dict[Way, int]:
        """Steps of each way so far."""
        return {training.way: len(training.losses) for training in self.trainings}

    def seconds_left(self) -> float:
        """Seconds until all steps are made, judged by those that were."""
        left = self.seconds_each() * (self.steps - self.round)
        return left if self.patience is None else min(left, self.patience - self._elapsed())

    def seconds_each(self) -> float:
        """Seconds that a step of all four has taken so far."""
        return self._elapsed() / max(self.round, 1)

    def _running(self) -> Sequence[Training]:
        return [training for training in self.trainings if training.way not in self._resting]

    def _too_slow(self) -> bool:
        return self.patience is not None and self.seconds_each() * self.steps > self.patience

    def _out_of_patience(self) -> bool:
        return self.patience is not None and self._elapsed() > self.patience

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _step(self, training: Training) -> None:
        if self.round > 1:
            training.step()
            return
        with caught(training.linears, LAYERS) as gradients:
            training.step()
        self.flows[training.way] = tuple(histogram(number, gradients[number]) for number in LAYERS)

    @staticmethod
    def _test(trainings: Sequence[Training]) -> None:
        for training in trainings:
            training.test()
