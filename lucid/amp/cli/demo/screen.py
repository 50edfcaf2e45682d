"""The demo in a terminal: a live table, charts and words; plain lines where nobody watches.

Knows consoles: width, colour, encoding, whether somebody watches. Refuses to know how numbers are made
and what they mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TextIO

from lucid.amp import ScaleUpdate
from lucid.amp.cli.demo import chart, words
from lucid.amp.cli.demo.race import Race
from lucid.amp.cli.demo.record import GUESS, Row
from lucid.amp.cli.demo.task import Training

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES = {
    chart.KEPT: "cyan",
    chart.TRUE: "dim",
    chart.EDGE: "bold",
    chart.SKIP: "bold red",
    chart.GROWTH: "bold green",
}

_ASCII = str.maketrans("█▇▆▅▄▃▂▁░│─└├┤×▲₂", "###==::.'|-+++x^2")
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_WIDEST = 100

_ASCII_LINE = "    \n    \n -- \n    \n    \n    \n    \n    \n"
"""A line below a table's head and nothing else, in rich's notation."""

# The columns of numbers, and how wide they are at most; a heading of several words is folded.
_NUMBERS = {"loss": 6, "test right": 6, "layer 1 zero": 7, "skipped": 7, "scale": 5}


def to_ascii(text: str) -> str:
    """The same text for a console that has ASCII only: ``2⁻²⁴`` becomes ``2^-24``, blocks become signs."""
    return re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: "^" + run.group().translate(_POWERS), text).translate(_ASCII)


class Screen:
    """Where a run is told.

    Args:
        stream: standard output, or standard error where standard output carries JSON.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        watched = stream.isatty()
        # FORCE_COLOR may not turn a file into a terminal: plain means no control codes.
        self.console = Console(file=stream, force_terminal=watched, highlight=False, markup=False, emoji=False)
        self.live = watched and not self.console.is_dumb_terminal
        self.ascii = not self.console.encoding.lower().startswith("utf")
        self.width = min(self.console.width, _WIDEST)
        self._tenth = 0

    def say(self, text: str = "", folded: bool = True) -> None:
        """A paragraph, folded at the console's width unless it holds a path that one may want to copy."""
        self.console.print(self._text(text), width=self.width if folded else None, soft_wrap=not folded)

    def heading(self, text: str) -> None:
        """A heading, with a blank line above."""
        self.console.print()
        self.console.print(self._text(text), style="bold", width=self.width)

    def chart(self, lines: Iterable[str]) -> None:
        """Lines that are not folded, their signs in colours."""
        for line in lines:
            painted = self._text(line)
            for sign, style in _STYLES.items():
                painted.highlight_words([sign], style)
            self.console.print(painted, no_wrap=True, overflow="crop", crop=True)

    def watch(self, race: Race, seeds_after: int) -> AbstractContextManager[object]:
        """Within the scope the race is shown as it goes, where somebody watches."""
        from rich.live import Live

        self._tenth = 0
        if not self.live:
            return nullcontext()
        return Live(get_renderable=lambda: self._race(race, seeds_after), console=self.console, refresh_per_second=8)

    def progress(self, race: Race, seeds_after: int) -> None:
        """Where nobody watches, a line at each tenth of the way."""
        tenth = race.round * 10 // race.steps
        if self.live or tenth == self._tenth:
            return
        names = [training.way.name.removesuffix(", no scaling") for training in race.trainings]
        if self._tenth == 0:
            self.say("  ".join([f"{f'seed {race.seed}, at step':>18}", *names, "time left"]))
        self._tenth = tenth
        losses = [f"{training.losses[-1]:.4f}" for training in race.trainings]
        cells = [f"{loss:>{len(name)}}" for name, loss in zip(names, losses, strict=True)]
        self.say("  ".join([f"{f'{race.round} of {race.steps}':>18}", *cells, _time_left(race, seeds_after)]))

    def move(self, step: int, update: ScaleUpdate) -> None:
        """A line for a skip or a growth; nothing for a step at which the scale stood still."""
        if update.new_scale == update.scale:
            return
        sign, what = (chart.SKIP, "overflow, step skipped") if update.overflow else (chart.GROWTH, "growth")
        old, new = (words.power(math.log2(scale)) for scale in (update.scale, update.new_scale))
        self.chart([f"  step {step:>3}  {sign} scale {old} to {new}: {what}"])

    def table(self, rows: Sequence[Row]) -> None:
        """The final table, a row per way."""
        cells = [
            (
                row.way.name,
                words.verdict(row),
                f"{row.loss:.4f}",
                f"{row.test_accuracy:.1%}",
                f"{row.zero_gradients[0]:.1%}",
                *_scaling(row.way.scaled, row.skipped, row.scale),
            )
            for row in rows
        ]
        self.console.print(self._table("result", cells), width=self.width)
        seeds = len(rows[0].results)
        self.say(
            "test right: share of the test digits. layer 1 zero: share of the first layer's weight gradients that "
            "were exactly 0 at step 1." + (f" Medians of {seeds} seeds." if seeds > 1 else "")
        )

    def _race(self, race: Race, seeds_after: int) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding

        cells = [self._running(training) for training in race.trainings]
        share = race.round / race.steps
        more = f" (+{seeds_after})" if seeds_after else ""
        done = f"seed {race.seed}{more}, step {race.round}/{race.steps}, {_time_left(race, seeds_after)}"
        line = f"{chart.bar(share, max(self.width - len(done) - 4, 10))}  {done}"
        return Group(self._table("loss so far", cells), Padding(self._text(line), (0, 1)))

    def _running(self, training: Training) -> tuple[str, ...]:
        zeros = f"{training.zero_gradients[0]:.1%}" if training.zero_gradients else ""
        return (
            training.way.name,
            chart.curve(training.losses, GUESS, self._curve_width),
            f"{training.losses[-1]:.4f}" if training.losses else "",
            "" if math.isnan(training.accuracy) else f"{training.accuracy:.1%}",
            zeros,
            *_scaling(training.way.scaled, training.skipped, training.scaler.get_scale()),
        )

    @property
    def _curve_width(self) -> int:
        return max(self.width - 65, 6)

    def _table(self, second: str, cells: Iterable[tuple[str, ...]]) -> Table:
        from rich import box
        from rich.table import Table

        # rich's own stand-in for ASCII draws a cage around each number.
        line = box.Box(_ASCII_LINE, ascii=True) if self.ascii else box.SIMPLE_HEAD
        table = Table(box=line, padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("way", no_wrap=True)
        table.add_column(second, no_wrap=True)
        for name, width in _NUMBERS.items():
            table.add_column(name, justify="right", width=width)
        for row in cells:
            table.add_row(*(self._text(cell) for cell in row))
        return table

    def _text(self, text: str) -> Text:
        from rich.text import Text

        return Text(to_ascii(text) if self.ascii else text)


def _scaling(scaled: bool, skipped: int, scale: float) -> tuple[str, str]:
    return (str(skipped), words.power(math.log2(scale))) if scaled else ("-", "-")


def _time_left(race: Race, seeds_after: int) -> str:
    """Of this race and those on the seeds that follow, judged by this one's speed."""
    if not race.round:
        return "starting"
    left = race.seconds_left()
    if seeds_after:
        left += seeds_after * race.steps * race.seconds_each()
    minutes, seconds = divmod(max(round(left), 0), 60)
    return f"{minutes}:{seconds:02} left"
