"""What a run of the demo showed, in plain words, and no more than that.

Knows which sentence each outcome deserves: a network that has not learnt yet in float32 proves nothing
about float16, and float16 without scaling may well learn. Refuses to know consoles and pictures. Every
number is the record's.
"""

from __future__ import annotations

import itertools
import math

from lucid.amp.cli.demo.flow import HALF_FROM, Histogram
from lucid.amp.cli.demo.record import GUESS, Record, Row
from lucid.amp.cli.demo.sawtooth import GROWTH_INTERVAL
from lucid.amp.cli.demo.task import BFLOAT16, CLASSES, FLOAT32, SCALED, UNSCALED, WIDTH, Way

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")

_GUESSING = f"guessing gives a loss of ln {CLASSES} = {GUESS:.4f} and about {1 / CLASSES:.0%}"

# What is said of a way where float32 learnt, by the way's own state.
_OUTCOMES = {
    UNSCALED: {
        "learns": "In float16 without scaling it learns, too: {told}. On this run float16 alone was enough.",
        "begins": "In float16 without scaling it falls behind: {told}.",
        "guesses": f"In float16 without scaling the same network learns nothing: {{told}}; {_GUESSING}.",
        "mixed": "In float16 without scaling it learns on {learnt} of {seeds} seeds: {told}.",
    },
    SCALED: {
        "learns": "With GradScaler it learns in float16: {told}, {skipped}.",
        "begins": "With GradScaler it falls behind in float16: {told}, {skipped}.",
        "guesses": "With GradScaler it has not learnt in float16 either: {told}, {skipped}.",
        "mixed": "With GradScaler it learns in float16 on {learnt} of {seeds} seeds: {told}, {skipped}.",
    },
    BFLOAT16: {
        "learns": "In bfloat16, which has float32's range, it learns without scaling: {told}.",
        "begins": "In bfloat16 without scaling it falls behind: {told}.",
        "guesses": "In bfloat16 without scaling it has not learnt: {told}.",
        "mixed": "In bfloat16 without scaling it learns on {learnt} of {seeds} seeds: {told}.",
    },
}

_TRIED_IN_FLOAT32 = {
    "learns": "In float32 the network learns: {told}.",
    "mixed": "In float32 the network learns on {learnt} of {seeds} seeds: {told}.",
    "begins": "In float32 the network has only begun to learn: {told}; {guess}.",
    "guesses": "In float32 the network has not learnt yet: {told}; {guess}.",
}

CAVEAT = (
    "The six sigmoids were chosen to make gradients small. Many networks train well in float16 without any "
    "scaling, and where the hardware has bfloat16 you usually need none of this."
)


def power(exponent: float) -> str:
    """A power of two as text: ``2⁻²⁴``; the exponent is rounded to a whole number."""
    return "2" + f"{exponent:.0f}".translate(_SUPERSCRIPTS)


def counted(number: int, thing: str) -> str:
    """A number of things: ``1 skip``, ``2 skips``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def state(row: Row) -> str:
    """One word for a row: learns, begins, guesses; mixed where the seeds disagree about learning."""
    seeds = len(row.results)
    if 0 < row.learnt < seeds:
        return "mixed"
    if row.learnt:
        return "learns"
    return "guesses" if row.guessing == seeds else "begins"


def verdict(row: Row) -> str:
    """A row's state as the table shows it."""
    seeds = len(row.results)
    shown = {"begins": "begins to", "mixed": f"learns {row.learnt}/{seeds}"}
    return shown.get(state(row), state(row))


def cut_short(made: dict[Way, int], asked: int) -> str | None:
    """Which ways stopped before the steps that were asked for, and how to wait for all; None where none did."""
    short = [f"{way.name} at step {steps}" for way, steps in made.items() if steps < asked]
    if not short:
        return None
    return f"Stopped early, so that the demo ends soon: {'; '.join(short)}. --steps {asked} waits for all."


def paragraphs(record: Record) -> list[str]:
    """The run in plain words, a paragraph each: outcome, reason, remedy, the scale at work, the caveat."""
    return [outcome(record), reason(record), remedy(record), scale_at_work(record), CAVEAT]


def outcome(record: Record) -> str:
    """Who learnt; nothing about float16 where float32 has not learnt yet."""
    float32 = record.row(FLOAT32)
    first = _filled(_TRIED_IN_FLOAT32[state(float32)], float32)
    if not float32.learnt:
        return f"{first} So this run cannot show what float16 costs a training; more --steps may."
    rest = (_filled(_OUTCOMES[way][state(record.row(way))], record.row(way)) for way in _OUTCOMES)
    return " ".join([first, *rest])


def reason(record: Record) -> str:
    """What became of the gradients in float16 without scaling, at step 1 and at the end."""
    row, usual = record.row(UNSCALED), record.row(FLOAT32).zero_gradients
    lost = [number for number, share in enumerate(row.zero_gradients, 1) if share > usual[number - 1] + 0.01]
    if not lost:
        return "At step 1 float16 without scaling had no more zeros among its weight gradients than float32."
    shares = ", ".join(f"layer {number} {row.zero_gradients[number - 1]:.0%}" for number in lost)
    way_back = ", ".join(f"{power(shown.middle)} at layer {shown.layer}" for shown in record.flows[FLOAT32][::-1])
    text = (
        "Why: each sigmoid makes the gradient smaller on its way back to the first layer. In float32 its median "
        f"is {way_back}; float16 holds nothing below {power(HALF_FROM)}, so what is smaller becomes 0. Weight "
        f"gradients of exactly 0 at step 1: {shares}."
    )
    if row.frozen == len(row.results):
        text += (
            f" After {counted(row.steps, 'step')} the first layer's weights are bit for bit what they were at first."
        )
    if abs(usual[0] - record.blank) < 0.005 and record.blank:
        text += (
            f" (In float32 layer 1 has {usual[0]:.1%}: {record.blank * WIDTH:.0f} of the {WIDTH} pixels are "
            "blank in every picture.)"
        )
    return text


def remedy(record: Record) -> str:
    """What scaling did to the gradient that arrives at the first layer."""
    before, after = record.flows[FLOAT32][0], record.flows[SCALED][0]
    text = (
        "GradScaler multiplies the loss before the backward pass and divides the gradients by the same "
        "number, in float32, before the step."
    )
    if after.overflowed or math.isnan(after.middle):
        return text
    moved = round(after.middle - before.middle)
    return (
        f"{text} Here that moved the gradient at layer 1 by {moved} powers of two, to a median of "
        f"{power(after.middle)}; {after.zeros:.1%} of it is 0 instead of {_unscaled(record).zeros:.1%}."
    )


def scale_at_work(record: Record) -> str:
    """The run that starts with a scale far too high: what was skipped, where it settled, what grew."""
    updates = record.updates
    skips = sum(update.overflow for update in updates)
    growths = sum(update.new_scale > update.scale for update in updates)
    first = len(list(itertools.takewhile(lambda update: update.overflow, updates)))
    text = f"Started far too high, at {power(math.log2(updates[0].scale))}, the scaler "
    if first:
        text += f"skipped the first {counted(first, 'step')} and halved the scale each time, to "
        text += f"{power(math.log2(updates[first - 1].new_scale))}; then it "
    text += f"doubled it after every {GROWTH_INTERVAL} steps in a row without an overflow: "
    text += f"{counted(growths, 'growth')} and {counted(skips, 'skip')} in {counted(len(updates), 'step')}."
    return text + " No step with an inf or NaN in its gradients reached the weights."


def title_of_losses(record: Record) -> str:
    """What the four losses show together."""
    states = {way: state(record.row(way)) for way in (FLOAT32, *_OUTCOMES)}
    others = [found for way, found in states.items() if way is not UNSCALED]
    if states[UNSCALED] == "guesses" and set(others) == {"learns"}:
        return "float16 learns nothing without scaling; with GradScaler it learns"
    return f"The loss of the four ways over {counted(record.row(FLOAT32).steps, 'step')}"


def title_without_scaling(record: Record) -> str:
    """What float16 kept of the gradient at the first layer, without scaling."""
    return f"Without scaling float16 turns {_unscaled(record).zeros:.0%} of layer 1's gradient into 0"


def title_with_scaling(record: Record) -> str:
    """Where the same gradient lies with the scaler."""
    before, after = record.flows[FLOAT32][0], record.flows[SCALED][0]
    if after.overflowed or math.isnan(after.middle):
        return "With GradScaler some of it overflows at step 1: that step is skipped"
    moved = round(after.middle - before.middle)
    return f"With GradScaler it moves {moved} powers of two to the right, into float16's window"


def title_of_scale(record: Record) -> str:
    """The scale's own story in one line."""
    skips = sum(update.overflow for update in record.updates)
    growths = sum(update.new_scale > update.scale for update in record.updates)
    moves = f"{counted(skips, 'skip')} and {counted(growths, 'growth')}"
    return f"The scale at work: {moves} in {counted(len(record.updates), 'step')}"


def _unscaled(record: Record) -> Histogram:
    return record.flows[UNSCALED][0]


def _filled(sentence: str, row: Row) -> str:
    seeds = len(row.results)
    loss = f"{f'median loss of {seeds} seeds' if seeds > 1 else 'loss'} {row.loss:.4f}"
    return sentence.format(
        told=f"{loss} after {counted(row.steps, 'step')}, {row.test_accuracy:.1%} of the test digits right",
        learnt=row.learnt,
        seeds=seeds,
        skipped=f"{counted(row.skipped, 'step')} skipped",
        guess=_GUESSING,
    )
