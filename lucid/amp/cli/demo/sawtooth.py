"""The scale at work: a short training that starts with a scale far too high and lets it grow soon.

Knows the settings under which the scale moves within seconds; at its defaults it would not move at all in
a run as short as the demo's. Refuses to know how the moves are shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from lucid.amp import GradScaler, ScaleUpdate
from lucid.amp.cli.demo.task import SCALED, Digits, Training

INIT_SCALE = 2.0**30
GROWTH_INTERVAL = 20
STEPS = 140


def moves(digits: Digits, seed: int) -> Iterator[ScaleUpdate]:
    """Train 140 steps in float16 and give each step's update as it happens."""
    scaler = GradScaler(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    updates: list[ScaleUpdate] = []
    scaler.register_update_hook(lambda _, update: updates.append(update))
    training = Training(SCALED, digits, seed, scaler)
    for _ in range(STEPS):
        training.step()
        yield updates.pop()
