"""What a run tells: the findings, the most useful first, each with what to do.

Knows what a history and the causes mean for somebody who trains. Refuses to know files, pages and terminals.
"""

from __future__ import annotations

from collections.abc import Iterator

from lucid.amp.cli.report._content import Finding
from lucid.amp.cli.report._layers import finding_of
from lucid.amp.cli.report._run import Run, ScalerRun
from lucid.amp.cli.report._skips import BENIGN, of_skips, title_of
from lucid.amp.cli.report._text import power, times
from lucid.amp.diagnosis._kinds import Kind

__all__ = ["findings"]

NEEDED = (
    "Nothing, if the forward runs in float32 or bfloat16. If it runs under `torch.autocast` in float16, make a "
    "scaler: `scaler = lucid.amp.GradScaler()`, then `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, "
    "`scaler.update()`."
)


def findings(run: Run) -> tuple[Finding, ...]:
    """All findings, those that ask for action first, and among equals those that cost most updates."""
    found = [*_ending(run), *_scalers_at_all(run)]
    for scaler in run.scalers:
        name = f" of scaler {scaler.number + 1}" if len(run.scalers) > 1 else ""
        found += [*of_skips(scaler, name), *_without_skip(scaler), *_collapse(scaler, name), *_quiet(scaler, name)]
    for sample in run.samples:
        found += finding_of(sample.ranges, sample.step)
    order = {"act": 0, "look": 1, "fine": 2}
    # What two scalers tell of one model is told once.
    found = list(dict.fromkeys(found))
    return tuple(sorted(found, key=lambda finding: order[finding.weight]))


def _ending(run: Run) -> Iterator[Finding]:
    ending = run.facts.get("ending")
    if ending is None:
        yield Finding(
            "look",
            "The script has not come to its end",
            ("It was killed, or it is still running; this report tells what was recorded so far.",),
        )
    elif not ending.startswith("exit "):
        yield Finding("look", f"The script ended with {ending.partition(':')[0]}", (f"`{ending}`",))


def _scalers_at_all(run: Run) -> Iterator[Finding]:
    made = run.facts.get("scalers", [])
    if not made:
        yield Finding(
            "look",
            "The script made no gradient scaler",
            (
                "No step was scaled and none could be skipped. Scalers in processes that the script starts itself "
                "(`torch.multiprocessing.spawn`) are not seen: start those with `torchrun … -m lucid.amp run`.",
            ),
            NEEDED,
        )
    elif not run.enabled:
        yield Finding(
            "look",
            "The script's scaler was switched off",
            (f"`{made[0]['class']}` was disabled: the loss was not scaled and no step was checked.",),
            "Make sure that this is meant. PyTorch's scaler for CUDA switches itself off where there is no CUDA; "
            "`enabled=False` does it by hand. In bfloat16 or float32 that is right.",
        )
    elif run.updates == 0 and str(run.facts.get("ending")).startswith("exit "):
        yield Finding(
            "act",
            "The scaler never moved",
            ("A scaler was made and is enabled, yet its `update()` was never called.",),
            "Call `scaler.scale(loss).backward()`, `scaler.step(optimizer)` and `scaler.update()` in every iteration.",
        )


def _without_skip(scaler: ScalerRun) -> Iterator[Finding]:
    """What was wrong at the end though nothing was skipped: float16 parameters, gradients that are all zero."""
    told = [each for each in scaler.causes if each.get("without_skip")]
    for cause in told[-1]["causes"] if told else ():
        *facts, advice = cause["sentences"]
        yield Finding(
            "look" if cause["kind"] == Kind.UNSCALED.value else "act",
            title_of(cause["kind"], cause),
            tuple(facts),
            advice,
        )


def _collapse(scaler: ScalerRun, name: str) -> Iterator[Finding]:
    """A scale below 1: what its fall follows from, and the way back."""
    history = scaler.history
    if not history or history[-1].new_scale >= 1:
        return
    title = f"The scale{name} fell to {power(history[-1].new_scale)}"
    falls = [record.kind for record in history if record.overflow]
    hopeless = sum(kind is not None and kind not in BENIGN for kind in falls)
    if 2 * hopeless > len(falls):
        which = "each time" if hopeless == len(falls) else f"{hopeless:,} of them"
        told = f"It fell {times(len(falls))}, {which} at updates that no lower scale could help: told above."
        yield Finding("look", title, (told,), _way_back(scaler))
        return
    yield Finding(
        "look",
        title,
        ("Below 1 the loss is made smaller instead of larger before the backward.",),
        "Take a mean instead of a sum in the loss, if there is one; otherwise see why steps are skipped.",
    )


def _way_back(scaler: ScalerRun) -> str:
    settings = scaler.facts.get("settings", {})
    slow = ""
    if "growth_interval" in settings:
        slow = f" By itself the scale grows only once in {settings['growth_interval']:,} updates."
    scale = settings.get("scale", 65536.0)
    return f"Mend that first. Then begin with a new scaler, or set the scale with `scaler.update({scale})`.{slow}"


def _quiet(scaler: ScalerRun, name: str) -> Iterator[Finding]:
    history = scaler.history
    if history and not any(record.overflow or record.skipped for record in history):
        yield Finding(
            "look",
            f"No optimizer{name} was stepped through the scaler",
            (f"{len(history)} updates without a `scaler.step(optimizer)`: no step can be skipped.",),
            "Call `scaler.step(optimizer)` instead of `optimizer.step()`.",
        )
    elif history and not any(record.overflow for record in history):
        scales = {record.scale for record in history}
        grown = f" It grew from {power(history[0].scale)} to {power(history[-1].scale)}." if len(scales) > 1 else ""
        yield Finding(
            "fine",
            f"No step{name} was skipped",
            (f"{len(history)} updates, each of them finite, at scale {power(history[-1].scale)}.{grown}",),
        )
