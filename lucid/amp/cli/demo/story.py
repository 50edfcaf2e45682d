"""The demo from beginning to end: race, gradients, scale, table, words, picture.

Knows the order in which things are made and told. Refuses to know how.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lucid.amp import autocast
from lucid.amp.cli.demo import chart, picture, words
from lucid.amp.cli.demo.flow import HALF_FROM, HALF_TO
from lucid.amp.cli.demo.race import Race
from lucid.amp.cli.demo.record import Record, Row
from lucid.amp.cli.demo.sawtooth import GROWTH_INTERVAL, INIT_SCALE, moves
from lucid.amp.cli.demo.screen import Screen
from lucid.amp.cli.demo.task import (
    FLOAT32,
    SCALED,
    SIGMOIDS,
    TRAINED_ON,
    UNSCALED,
    WAYS,
    Digits,
    Result,
    load_digits,
)


def tell(
    screen: Screen, seeds: range, steps: int, patience: float | None, device: torch.device, place: Path
) -> dict[str, Any]:
    """Run the whole demo on a screen and save its picture.

    Args:
        screen: where it is told.
        seeds: at least one; the gradients and the scale are shown on the first.
        steps: training steps of each way.
        patience: seconds after which a seed's training is cut short; None never cuts.
        device: where to train.
        place: the PNG's path.

    Returns:
        The record as one object that JSON can hold; its ``picture`` is None where that could not be written.
    """
    with _one_thread():
        record = Record(_settings(seeds, steps, device))
        _introduce(screen, record)
        digits = load_digits(device)
        record.blank = digits.blank
        _train(screen, record, digits, seeds, steps, patience)
        _show_flow(screen, record)
        _show_scale(screen, record, digits, seeds[0])
    screen.heading("What this run showed")
    screen.table(record.rows)
    screen.say()
    for paragraph in words.paragraphs(record):
        screen.say(paragraph)
        screen.say()
    return record.as_dict() | {"picture": _draw(screen, record, place)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core within the scope.

    A second one brings layers this small next to nothing, and where another program keeps it busy each
    operator waits for it: measured, a hundred times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _settings(seeds: range, steps: int, device: torch.device) -> dict[str, Any]:
    return {
        "seed": seeds[0],
        "seeds": len(seeds),
        "steps": steps,
        "device": str(device),
        "float16_arithmetic": autocast(device.type, torch.float16).arithmetic,
        "torch": torch.__version__,
    }


def _introduce(screen: Screen, record: Record) -> None:
    settings = record.settings
    screen.say(
        f"scikit-learn's digits, {SIGMOIDS} sigmoid layers, {settings['steps']} steps on all {TRAINED_ON} training "
        f"digits at once; on {settings['device']}, PyTorch {settings['torch']}."
    )
    if settings["float16_arithmetic"] == "float32":
        screen.say("float16 is stored and rounded as such, and multiplied in float32: faster on this processor.")


def _train(screen: Screen, record: Record, digits: Digits, seeds: range, steps: int, patience: float | None) -> None:
    results: list[list[Result]] = []
    for place, seed in enumerate(seeds):
        race = Race(digits, seed, steps, patience)
        with screen.watch(race, len(seeds) - place - 1):
            for _ in race.rounds():
                screen.progress(race, len(seeds) - place - 1)
        if (notice := words.cut_short(race.steps_made(), steps)) is not None:
            screen.say(notice)
        results.append([training.result() for training in race.trainings])
        if not record.flows:
            record.flows = race.flows
            record.losses = {training.way: training.losses for training in race.trainings}
    record.rows = tuple(Row(way, row) for way, row in zip(WAYS, zip(*results, strict=True), strict=True))


def _show_flow(screen: Screen, record: Record) -> None:
    true = record.flows[FLOAT32]
    screen.heading(f"1. {words.title_without_scaling(record)}")
    screen.say(
        f"The gradient as it arrives at three of the seven layers, at step 1 (seed {record.settings['seed']}). "
        f"A column is a power of two; {chart.TRUE} is what float32 has, {chart.KEPT} what float16 kept. float16 "
        f"holds {words.power(HALF_FROM)} to {words.power(HALF_TO)}; what is smaller piles up at the left, as 0."
    )
    screen.chart(chart.flow(record.flows[UNSCALED], true))
    screen.heading(f"2. {words.title_with_scaling(record)}")
    screen.chart(chart.flow(record.flows[SCALED], true))


def _show_scale(screen: Screen, record: Record, digits: Digits, seed: int) -> None:
    screen.heading("3. The scale at work")
    screen.say(
        f"A short run that starts far too high, at {words.power(math.log2(INIT_SCALE))}, and tries twice the "
        f"scale after {GROWTH_INTERVAL} good steps. At its defaults the scale would not move in a run this short."
    )
    for step, update in enumerate(moves(digits, seed), 1):
        record.updates.append(update)
        screen.move(step, update)
    screen.heading(words.title_of_scale(record))
    screen.say(
        f"log₂ of the scale at each step: {chart.SKIP} overflow, the step is skipped and the scale halved; "
        f"{chart.GROWTH} the scale is doubled after this step."
    )
    screen.chart(chart.staircase(record.updates, screen.width))


def _draw(screen: Screen, record: Record, place: Path) -> str | None:
    try:
        picture.draw(record, place)
    except OSError as error:
        screen.say(f"The picture could not be written to {place}: {error.strerror}", folded=False)
        return None
    screen.say(f"The same as a picture: {place}", folded=False)
    return str(place)
