"""``lucid-amp demo``: its task, its histograms, its words, and what a person sees on any terminal.

Knows what the demo must show of float16 on a CPU, as it was measured with PyTorch alone. Pictures are only
checked to be there; they were looked at by eye.
"""

import io
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lucid.amp import ScaleUpdate, cli
from lucid.amp.cli.demo import chart, flow, picture, race, sawtooth, screen, story, task, words
from lucid.amp.cli.demo.record import GUESS, Record, Row
from lucid.amp.cli.demo.task import BFLOAT16, FLOAT32, SCALED, UNSCALED, WAYS, Digits, Result, Training, Way

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one core, as the demo itself does: a second one brings such small layers next to nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits(device: torch.device) -> Digits:
    """The demo's data, on each device in turn."""
    return task.load_digits(device)


@pytest.fixture
def short_scale_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the run that shows the scale at work to the steps that a growth needs."""
    monkeypatch.setattr(sawtooth, "STEPS", 35)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing out, where the test is about something else."""
    monkeypatch.setattr(picture, "draw", lambda record, path: None)


# ---------------------------------------------------------------- the task


def test_the_digits_are_shuffled_by_seed_0_and_split(digits: Digits) -> None:
    """1500 digits to train on and the other 297 to test, pixels divided by 16, in the order of seed 0."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).tolist()
    assert (digits.train_x.shape, digits.test_x.shape) == ((1500, 64), (297, 64))
    assert digits.train_x[0].tolist() == [pixel / 16 for pixel in raw.data[order[0]]]
    assert digits.test_x[-1].tolist() == [pixel / 16 for pixel in raw.data[order[-1]]]
    assert torch.cat([digits.train_y, digits.test_y]).tolist() == [raw.target[place] for place in order]
    assert digits.blank == sum(not raw.data[order[:1500], pixel].any() for pixel in range(64)) / 64


def test_the_network_is_six_sigmoid_layers_and_a_linear_one() -> None:
    """The layers that the task names, initialised from the seed and from nothing else."""
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, other = task.network(3), task.network(3), task.network(4)
    assert torch.rand(1) == expected
    assert [type(layer) for layer in first] == [nn.Linear, nn.Sigmoid] * 6 + [nn.Linear]
    assert [tuple(layer.weight.shape) for layer in first if isinstance(layer, nn.Linear)] == [(64, 64)] * 6 + [(10, 64)]
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_float32_is_a_plain_training_loop(digits: Digits) -> None:
    """The float32 way gives bit for bit what the loop gives that a person would write without any scaler."""
    model = task.network(0).to(digits.train_x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    training = Training(FLOAT32, digits, seed=0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(digits.train_x), digits.train_y)
        loss.backward()
        optimizer.step()
        training.step()
    assert training.losses[-1] == loss.item()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), training.model.parameters(), strict=True))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_way_computes_in_its_dtype(way: Way, digits: Digits) -> None:
    """The heavy operators run in the way's dtype; the weights and their gradients stay float32."""
    training = Training(way, digits, seed=0)
    with flow.caught(training.linears, (1, 7)) as gradients:
        training.step()
    assert {gradient.dtype for gradient in gradients.values()} == {way.dtype}
    assert {weight.dtype for weight in training.model.parameters()} == {torch.float32}
    assert training.scaler.is_enabled() == way.scaled


# ---------------------------------------------------------------- the claims


def test_without_scaling_float16_does_not_learn_and_with_the_scaler_it_does(digits: Digits) -> None:
    """At seed 0, within 150 steps, three ways learn; unscaled float16 guesses: its first layers get only zeros."""
    ran = race.Race(digits, seed=0, steps=150)
    assert list(ran.rounds()) == list(range(1, 151))
    rows = {training.way: Row(training.way, (training.result(),)) for training in ran.trainings}
    assert {way: words.state(row) for way, row in rows.items()} == {
        FLOAT32: "learns", UNSCALED: "guesses", SCALED: "learns", BFLOAT16: "learns",
    }  # fmt: skip
    assert rows[UNSCALED].loss == pytest.approx(math.log(10), abs=1e-3)
    assert rows[UNSCALED].test_accuracy < 0.15 < 0.3 < rows[SCALED].test_accuracy
    assert rows[UNSCALED].zero_gradients[:2] == (1.0, 1.0)
    if digits.train_x.is_cpu:
        assert [round(100 * share) for share in rows[UNSCALED].zero_gradients] == [100, 100, 11, 0, 0, 0, 0]
    # The three blank pixels of 64 have no gradient in any arithmetic; everything else is not zero.
    assert [round(100 * share) for share in rows[SCALED].zero_gradients] == [5, 0, 0, 0, 0, 0, 0]
    assert rows[UNSCALED].results[0].first_layer_moved == 0
    assert rows[SCALED].results[0].first_layer_moved > 0.9
    first = {way: shown[0] for way, shown in ran.flows.items()}
    assert (first[UNSCALED].zeros, first[FLOAT32].zeros) == (1.0, 0.0)
    assert first[SCALED].middle - first[FLOAT32].middle == pytest.approx(16, abs=0.1)


def test_the_scale_at_work_shows_a_skip_and_a_growth(digits: Digits) -> None:
    """From 2³⁰ with an interval of 20, the scale is halved at each overflow and doubled after 20 good steps."""
    updates = list(sawtooth.moves(digits, seed=0))
    assert updates[0].scale == 2.0**30
    assert [now.scale for now in updates[1:]] == [before.new_scale for before in updates[:-1]]
    skips = [update for update in updates if update.overflow]
    growths = [update for update in updates if update.new_scale > update.scale]
    assert skips
    assert growths
    assert {update.new_scale / update.scale for update in skips} == {0.5}
    assert {update.new_scale / update.scale for update in growths} == {2.0}
    good_in_a_row = 0
    for update in updates:
        good_in_a_row = 0 if update.overflow else good_in_a_row + 1
        assert (update in growths) == (good_in_a_row == 20)
        good_in_a_row %= 20


# ---------------------------------------------------------------- the histograms


def test_a_histogram_sorts_magnitudes_by_powers_of_two() -> None:
    """Each value stands in the column of its power of two; zeros and what overflowed are counted apart."""
    values = [0.0, 0.0, 2.0**-24, -1.5 * 2.0**-24, 1.0, -3.0, 3.5, 65504.0, math.inf, math.nan]
    shown = flow.histogram(1, torch.tensor(values))
    held = {power: share for power, share in zip(itertools.count(flow.LOWEST), shown.shares) if share}
    assert held == pytest.approx({-24: 0.2, 0: 0.1, 1: 0.2, 15: 0.1})
    assert (shown.zeros, shown.overflowed) == pytest.approx((0.2, 0.2))
    # The ordinary magnitudes are 2⁻²⁴, 1.5·2⁻²⁴, 1, 3, 3.5, 65504: torch's median is the lower middle one.
    assert shown.middle == 0.0


def test_a_histogram_keeps_what_lies_beyond_its_columns() -> None:
    """A value too small or too large for a column of its own is counted in the outermost one."""
    shown = flow.histogram(1, torch.tensor([1e-38, 1e38]))
    assert (shown.shares[0], shown.shares[-1]) == (0.5, 0.5)


def test_a_histogram_of_zeros_has_no_middle() -> None:
    """Where nothing is left there is no median to speak of."""
    shown = flow.histogram(1, torch.zeros(8, dtype=torch.float16))
    assert shown.zeros == 1
    assert math.isnan(shown.middle)
    assert sum(shown.shares) == 0


def test_what_is_caught_is_the_gradient_of_the_layers_output() -> None:
    """A loss of three times the sum of the outputs has a gradient of 3 at each; afterwards nothing is caught."""
    layers = [nn.Linear(2, 4), nn.Linear(4, 1)]
    with flow.caught(layers, [2]) as gradients:
        (3 * layers[1](layers[0](torch.ones(5, 2)))).sum().backward()
    assert list(gradients) == [2]
    assert torch.equal(gradients[2], torch.full((5, 1), 3.0))
    gradients.clear()
    layers[1](torch.ones(1, 4)).sum().backward()
    assert gradients == {}


# ---------------------------------------------------------------- the charts


def bins(**shares: float) -> tuple[float, ...]:
    """Shares by power of two; ``m24`` is -24, ``p1`` is 1."""
    named = {int(name.replace("m", "-").replace("p", "")): share for name, share in shares.items()}
    return tuple(named.get(power, 0.0) for power in range(flow.LOWEST, flow.HIGHEST + 1))


def test_a_curve_is_as_high_as_the_loss() -> None:
    """Full blocks at the top, half a block at half of it, the lowest block near 0, ``?`` for what is not finite."""
    assert chart.curve([2.0, 2.0, 1.0, 1.0, 0.0, 0.0], top=2.0, width=3) == "█▄▁"
    assert chart.curve([2.0, math.nan], top=2.0, width=9) == "█?"
    assert chart.curve([], top=2.0, width=9) == ""


def test_the_pile_of_zeros_is_as_high_as_their_share() -> None:
    """All zeros fill the pile at the left, and the light columns show where float32 had its values."""
    lost = flow.Histogram(1, bins(), zeros=1.0, overflowed=0.0, middle=math.nan)
    true = flow.Histogram(1, bins(m32=0.5, m31=0.5), zeros=0.0, overflowed=0.0, middle=-31)
    _, *lines, ruler = chart.flow([lost], [true])
    assert [line[:12] for line in lines] == ["layer 1  ███", "zeros    ███", "100.0%   ███"]
    assert [line.count("░") for line in lines] == [2, 2, 2]
    assert lines[0].index("░") == ruler.index("-32")
    kept = flow.Histogram(1, bins(m16=0.5, m15=0.5), zeros=0.0, overflowed=0.0, middle=-15)
    _, *lines, ruler = chart.flow([kept], [true])
    assert [line.count("█") for line in lines] == [2, 2, 2]
    assert lines[0].index("█") == ruler.index("-16")
    assert "███" not in lines[0][:12]


def test_the_window_stands_where_float16_begins_and_ends() -> None:
    """The lines of float16's window stand left of the columns of 2⁻²⁴ and 2¹⁶, which is out of reach."""
    one = flow.Histogram(7, bins(m24=0.5, p15=0.5), zeros=0.0, overflowed=0.0, middle=0)
    head, *lines, ruler = chart.flow([one], [one])
    left, right = (place for place, sign in enumerate(lines[0]) if sign == chart.EDGE)
    assert (lines[0][left + 1], lines[0][right - 1]) == ("█", "█")
    assert (head.index("├"), head.index("┤")) == (left, right)
    assert (ruler.index("-24"), ruler.index("16", right)) == (left + 1, right + 1)
    assert right - left - 1 == 40
    assert max(map(len, [head, *lines, ruler])) < 80


def update(scale: float, new_scale: float, overflow: bool = False) -> ScaleUpdate:
    """One step of the run that shows the scale at work."""
    return ScaleUpdate(1, scale, new_scale, overflow, (overflow,))


def test_the_staircase_marks_skips_and_growths_at_their_heights() -> None:
    """A row for each power of two, a mark for each move, in the column of its step."""
    moves = [update(8, 4, overflow=True), update(4, 4), update(4, 8), update(8, 8)]
    assert chart.staircase(moves, width=80) == [
        "  3 │×  ─",
        "  2 │ ─▲",
        "    └────",
        "     0",
    ]


def test_a_staircase_fits_into_80_columns() -> None:
    """140 steps take two steps a column there, and no mark is lost that stands alone in its column."""
    moves = [update(8, 8)] * 138 + [update(8, 4, overflow=True), update(4, 4)]
    lines = chart.staircase(moves, width=80)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "  3 │" + "─" * 69 + "×"
    assert lines[1] == "  2 │" + " " * 69 + "─"


# ---------------------------------------------------------------- the words


def result(way: Way, loss: float, **changed: float) -> Result:
    """A result of 600 steps at a loss, with every gradient of float16 lost where it is not scaled."""
    lost = way is UNSCALED
    told = {
        "way": way.name,
        "seed": 0,
        "steps": 600,
        "loss": loss,
        "test_accuracy": 0.9 if loss < 1 else 0.1,
        "zero_gradients": (1.0, 1.0, 0.11, 0.0) if lost else (0.046875, 0.0, 0.0, 0.0),
        "first_layer_moved": 0.0 if lost else 0.95,
        "skipped": 0,
        "scale": 65536.0 if way.scaled else 1.0,
    }
    return Result(**(told | changed))  # type: ignore[arg-type]


def recorded(*losses: tuple[float, ...]) -> Record:
    """A record of the four ways, one tuple of losses a way, a loss a seed."""
    rows = tuple(Row(way, tuple(result(way, loss) for loss in row)) for way, row in zip(WAYS, losses, strict=True))
    before = flow.Histogram(1, bins(m31=1.0), zeros=0.0, overflowed=0.0, middle=-31.2)
    lost = flow.Histogram(1, bins(), zeros=1.0, overflowed=0.0, middle=math.nan)
    after = flow.Histogram(1, bins(m15=1.0), zeros=0.002, overflowed=0.0, middle=-15.2)
    flows = {FLOAT32: (before,), UNSCALED: (lost,), SCALED: (after,), BFLOAT16: (before,)}
    updates = [update(8, 4, overflow=True), update(4, 2, overflow=True), update(2, 2), update(2, 4)]
    curves = {way: [GUESS, row[0]] for way, row in zip(WAYS, losses, strict=True)}
    return Record({"seed": 0}, rows, flows, curves, blank=3 / 64, updates=updates)


USUAL = ((0.12,), (2.3023,), (0.13,), (0.16,))


def test_a_power_of_two_is_written_with_its_sign() -> None:
    """Exponents are raised, rounded to whole numbers."""
    assert (words.power(-24), words.power(15.8), words.power(0)) == ("2⁻²⁴", "2¹⁶", "2⁰")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((0.1,), "learns"),
        ((0.89 * GUESS,), "learns"),
        ((0.95 * GUESS,), "begins"),
        ((0.99 * GUESS,), "guesses"),
        ((5.0,), "guesses"),
        ((math.nan,), "guesses"),
        ((math.inf,), "guesses"),
        ((0.1, 2.3), "mixed"),
        ((0.1, 0.2), "learns"),
        ((2.3, 2.1), "begins"),
    ],
)
def test_a_row_is_called_what_its_losses_are(losses: tuple[float, ...], expected: str) -> None:
    """Under nine tenths of ln 10 on every seed is learning; above 98 % of it is a guess."""
    assert words.state(Row(FLOAT32, tuple(result(FLOAT32, loss) for loss in losses))) == expected


def test_the_usual_outcome_is_told_with_the_numbers_of_the_run() -> None:
    """Who learns, who does not, and why, with the record's own figures."""
    text = " ".join(words.paragraphs(recorded(*USUAL)))
    for told in (
        "In float32 the network learns: loss 0.1200 after 600 steps, 90.0% of the test digits right.",
        "without scaling the same network learns nothing: loss 2.3023",
        "ln 10 = 2.3026",
        "With GradScaler it learns in float16: loss 0.1300 after 600 steps, 90.0% of the test digits right, 0 steps",
        "In bfloat16, which has float32's range, it learns without scaling: loss 0.1600",
        "2⁻³¹ at layer 1",
        "layer 1 100%, layer 2 100%, layer 3 11%.",
        "bit for bit what they were",
        "4.7%: 3 of the 64 pixels",
        "by 16 powers of two, to a median of 2⁻¹⁵; 0.2% of it is 0 instead of 100.0%",
        "at 2³, the scaler skipped the first 2 steps and halved the scale each time, to 2¹;",
        "doubled it after every 20 steps in a row without an overflow: 1 growth and 2 skips in 4 steps",
        "Many networks train well in float16 without any scaling",
        "bfloat16 you usually need none of this",
    ):
        assert told in text


def test_nothing_is_claimed_of_float16_where_float32_has_not_learnt() -> None:
    """After too few steps the words say so, and neither blame float16 nor praise the scaler."""
    short = recorded((2.3039,), (2.3039,), (2.3039,), (2.3039,))
    text = words.outcome(short)
    assert "has not learnt yet: loss 2.3039" in text
    assert "cannot show what float16 costs" in text
    assert "learns" not in text
    assert "GradScaler" not in text
    assert "learns" not in words.title_of_losses(short)


def test_float16_that_learns_without_scaling_is_said_to_learn() -> None:
    """Where unscaled float16 was enough, the words and the title do not claim the contrary."""
    lucky = recorded((0.12,), (0.14,), (0.13,), (0.16,))
    assert "In float16 without scaling it learns, too: loss 0.1400" in words.outcome(lucky)
    assert "nothing" not in words.outcome(lucky) + words.title_of_losses(lucky)


def test_a_scaler_that_did_not_help_is_not_praised() -> None:
    """Where the scaled way still guesses, that is what is told."""
    poor = recorded((0.12,), (2.3023,), (2.3023,), (0.16,))
    assert "With GradScaler it has not learnt in float16 either: loss 2.3023" in words.outcome(poor)
    assert "learns" not in words.title_of_losses(poor)


def test_seeds_that_disagree_are_counted() -> None:
    """Over several seeds the number that learnt and the median loss are told."""
    three = recorded((0.12, 0.13, 0.14), (2.3, 2.3, 1.0), (0.12, 0.13, 0.14), (0.12, 0.13, 0.14))
    assert "without scaling it learns on 1 of 3 seeds: median loss of 3 seeds 2.3000" in words.outcome(three)
    assert words.verdict(three.row(UNSCALED)) == "learns 1/3"
    assert three.row(FLOAT32).loss == 0.13


def test_gradients_that_were_not_lost_are_not_said_to_be() -> None:
    """Without zeros beyond float32's own there is no reason to give."""
    kept = recorded(*USUAL)
    row = Row(UNSCALED, (result(UNSCALED, 0.2, zero_gradients=(0.05, 0.0, 0.0, 0.0), first_layer_moved=0.9),))  # type: ignore[arg-type]
    kept.rows = (kept.rows[0], row, *kept.rows[2:])
    assert words.reason(kept).startswith("At step 1 float16 without scaling had no more zeros")
    assert "bit for bit" not in words.reason(kept)


def test_an_overflow_at_the_first_step_is_told() -> None:
    """Where the scaled gradients overflow at step 1 nothing is said about where they moved."""
    hot = recorded(*USUAL)
    hot.flows[SCALED] = (flow.Histogram(1, bins(), zeros=0.0, overflowed=1.0, middle=math.nan),)
    assert "overflows" in words.title_with_scaling(hot)
    assert "powers of two" not in words.remedy(hot)


def test_a_record_is_one_object_that_json_can_hold() -> None:
    """Each way is a row with the figures that were asked for; what is not a number becomes null."""
    told = json.loads(
        json.dumps(recorded((0.12, 0.14), (math.nan, 2.3), (0.1, 0.2), (0.1, 0.2)).as_dict(), allow_nan=False)
    )
    assert [row["way"] for row in told["rows"]] == [way.name for way in WAYS]
    first, second = told["rows"][:2]
    assert first["loss"] == pytest.approx(0.13)
    assert (first["learnt"], first["skipped"], first["scale"]) == (2, 0, 1.0)
    assert second["loss"] is None
    assert [run["loss"] for run in second["runs"]] == [None, 2.3]
    assert second["zero_gradients"] == [1.0, 1.0, 0.11, 0.0]
    assert {"way", "loss", "test_accuracy", "zero_gradients", "skipped", "scale"} <= set(first)
    assert [step["overflow"] for step in told["updates"]] == [True, True, False, False]


# ---------------------------------------------------------------- patience


def test_on_a_slow_machine_what_learns_nothing_stops_first(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all steps would take too long, unscaled float16 stops once it has shown enough, and all at the end."""
    clock = [0.0]

    class Slow(Training):
        def step(self) -> None:
            clock[0] += 1.0
            super().step()

    monkeypatch.setattr(race.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(race, "Training", Slow)
    monkeypatch.setattr(race, "SHOWN_BY", 2)
    # Two rounds of four seconds, then three rounds of three: 17 seconds are the first above 16.
    ran = race.Race(digits, seed=0, steps=8, patience=16)
    assert list(ran.rounds()) == [1, 2, 3, 4, 5]
    steps = {training.way: training.result().steps for training in ran.trainings}
    assert steps == {FLOAT32: 5, UNSCALED: 2, SCALED: 5, BFLOAT16: 5}
    assert not any(math.isnan(training.result().test_accuracy) for training in ran.trainings)
    notice = words.cut_short(ran.steps_made(), 8)
    assert notice is not None
    assert "float16, no scaling at step 2;" in notice
    assert notice.endswith("--steps 8 waits for all.")
    patient = race.Race(digits, seed=0, steps=8, patience=33)
    assert list(patient.rounds()) == list(range(1, 9))
    assert {training.result().steps for training in patient.trainings} == {8}
    assert words.cut_short(patient.steps_made(), 8) is None


# ---------------------------------------------------------------- the screen


class Terminal(io.StringIO):
    """A stream that says that somebody watches."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        """Yes."""
        return True


def uncontrolled(text: str) -> str:
    """The text without the sequences that move the cursor and set colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def drive(stream: io.StringIO, place: Path, steps: int = 12, seeds: int = 1) -> str:
    """Tell a whole demo of a few steps to a stream and give what it received."""
    told = story.tell(screen.Screen(stream), range(seeds), steps, None, torch.device("cpu"), place)
    assert json.dumps(told, allow_nan=False)
    return stream.getvalue()


@pytest.fixture
def no_colour_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the environment may say about terminals."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("no_colour_settings", "short_scale_run")
def test_where_nobody_watches_there_are_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a file go lines of at most 80 columns without control codes, even where colours are forced."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = drive(io.StringIO(), tmp_path / "demo.png", seeds=2)
    assert CONTROL.findall(text) == []
    *lines, where = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert where == f"The same as a picture: {tmp_path / 'demo.png'}"
    assert re.search(r"^ +12 of 12 +2\.\d{4} +2\.\d{4} +2\.\d{4} +2\.\d{4} +0:00 left$", text, re.MULTILINE)
    assert "has not learnt yet" in " ".join(text.split())
    assert "Medians of 2 seeds" in " ".join(text.split())
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.usefixtures("no_colour_settings", "short_scale_run", "no_picture")
@pytest.mark.parametrize("columns", [80, 120])
def test_a_watched_table_fits_its_terminal(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live table shows all columns uncut, each step's progress and time left, and gives the cursor back."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = drive(Terminal(), tmp_path / "demo.png")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    *lines, where = uncontrolled(text).replace("\r", "\n").splitlines()
    assert where.endswith(str(tmp_path / "demo.png"))
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    headings = [line.split() for line in lines if "loss so far" in line]
    assert headings[0] == ["way", "loss", "so", "far", "loss", "right", "zero", "skipped", "scale"]
    assert any(re.search(r"seed 0, step 12/12, 0:00 left", line) for line in lines)


@pytest.mark.usefixtures("no_colour_settings", "short_scale_run", "no_picture")
@pytest.mark.parametrize("asked_not_to", [False, True], ids=["colours", "NO_COLOR"])
def test_no_color_is_obeyed(asked_not_to: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``NO_COLOR`` a terminal gets no colour, only what moves the cursor, bold and dim."""
    if asked_not_to:
        monkeypatch.setenv("NO_COLOR", "1")
    text = drive(Terminal(), tmp_path / "demo.png", steps=2)
    colour = re.search(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7])[0-9;]*m", text)
    assert (colour is None) == asked_not_to


@pytest.mark.usefixtures("no_colour_settings", "short_scale_run", "no_picture")
def test_a_console_without_unicode_gets_ascii(tmp_path: Path) -> None:
    """A Windows console in an old code page, or a C locale, can print every line."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    story.tell(screen.Screen(stream), range(1), 12, None, torch.device("cpu"), tmp_path / "demo.png")
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "2^-24" in text
    assert "x scale 2^30 to 2^29: overflow, step skipped" in text
    assert re.search(r"^layer 1  ###", text, re.MULTILINE)
    assert "?" not in text


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words_typed", "named"),
    [
        (["--steps", "0"], "--steps: 0 is not a whole number from 1"),
        (["--steps", "many"], "--steps: many is not"),
        (["--seeds", "0"], "--seeds: 0 is not"),
        (["--seed", "-1"], "--seed: -1 is not"),
        (["--seed", "1.5"], "--seed: 1.5 is not"),
        (["--device", "nosuch"], "--device 'nosuch': "),
        (["--device", "meta"], "--device 'meta': "),
        (["--device", "cuda:99"], "--device 'cuda:99': "),
        (["--device", ""], "--device '': "),
        (["--out", "{file}/below"], "--out {file}/below: cannot write {file}/below/lucid-demo.png: "),
        (["--out", "{folder}.png"], "--out {folder}.png: cannot write {folder}.png: "),
    ],
    ids=" ".join,
)
def test_a_bad_argument_is_one_line_before_any_work(
    words_typed: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Option, value and reason in one line on standard error, status 2, and no data was even loaded."""
    monkeypatch.setattr(story, "load_digits", lambda device: pytest.fail("work had begun"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    assert _status(["demo", *(word.format(**places) for word in words_typed)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("lucid-amp demo: ")
    assert named.format(**places) in shown.err


def _status(typed: list[str]) -> int:
    try:
        return cli.main(typed)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("module", "package"), [("rich", "rich"), ("matplotlib", "matplotlib"), ("sklearn", "scikit-learn")]
)
def test_a_missing_extra_is_one_line_before_any_work(
    module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says what to install, and not even the folder for the picture was made."""
    monkeypatch.setitem(sys.modules, module, None)
    assert _status(["demo", "--out", str(tmp_path / "new")]) == 2
    shown = capsys.readouterr()
    install = "pip install 'lucid-amp[demo]' (in a checkout: pip install '.[demo]')"
    assert shown == ("", f"lucid-amp demo: needs {package}, not installed here: {install}\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("short_scale_run")
def test_json_is_one_object_and_all_else_goes_to_standard_error(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--json`` leaves standard output to one object with a row per way, after zeros were measured at step 1."""
    place = tmp_path / "new" / "picture.png"
    assert (
        cli.main(["demo", "--json", "--steps", "2", "--seed", "3", "--out", str(place), "--device", str(device)]) == 0
    )
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["seed"], told["seeds"], told["steps"], told["device"]) == (3, 1, 2, str(device))
    assert [row["way"] for row in told["rows"]] == [way.name for way in WAYS]
    assert [len(row["zero_gradients"]) for row in told["rows"]] == [7] * 4
    assert told["rows"][1]["zero_gradients"][0] == 1.0
    assert told["picture"] == str(place)
    assert place.is_file()
    assert "What this run showed" in shown.err


@pytest.mark.usefixtures("short_scale_run")
def test_a_picture_that_cannot_be_written_after_all_loses_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full by the time of the drawing is told; the figures are printed all the same."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture, "draw", full)
    assert cli.main(["demo", "--json", "--steps", "2", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["picture"] is None
    assert "No space left on device" in shown.err


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["into a file", "on a terminal"])
def test_an_interruption_ends_cleanly(
    stream: Callable[[], io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C gives one line, status 130, the cursor back, and leaves no picture."""

    def interrupted(self: Training) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "step", interrupted)
    received = stream()
    monkeypatch.setattr(sys, "stdout", received)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 130
    text = received.getvalue()
    assert uncontrolled(text).splitlines()[-1] == "Interrupted; no picture was written."
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == (1 if stream is Terminal else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process alone")
def test_ctrl_c_ends_a_real_process_without_a_traceback(tmp_path: Path) -> None:
    """SIGINT in the middle of a training ends the process with status 130 and no traceback."""
    # A shell that starts the tests in the background has them ignore SIGINT, and their children too.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import lucid.amp.__main__"
    program = f"{program} as command; raise SystemExit(command.main())"
    typed = [sys.executable, "-c", program, "demo", "--steps", "100000", "--out", str(tmp_path)]
    with subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.splitlines()[-1] == "Interrupted; no picture was written."
    assert err == ""
