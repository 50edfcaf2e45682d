"""The kinds of cause and what to do about each: one table.

Knows words. Refuses to know how a kind is told from another: ``_verdict`` does.
"""

from __future__ import annotations

import enum


class Kind(str, enum.Enum):
    """Why a step was skipped, or what else is wrong."""

    LOSS = "loss not finite"
    BACKWARD = "backward overflowed"
    EARLIER = "earlier backward overflowed"
    STALE = "gradients never cleared"
    RANK = "another rank overflowed"
    HALF = "float16 parameter"
    ZERO = "gradients exactly zero"
    CLIPPED = "clipped before unscaling"
    UNSCALED = "divided and never scaled"
    BYPASSED = "stepped past the scaler"
    UNKNOWN = "not known"


class Reason(str, enum.Enum):
    """Why the loss was not finite, or the gradients are zero, as far as a replay could tell."""

    BATCH = "the batch itself is not finite"
    WEIGHTS = "weights are not finite"
    DIVERGED = "the weights have grown beyond use"
    RANGE = "an output beyond float16's 65504"
    PRECISION = "finite in float32, not in float16"
    FORMULA = "not finite in float32 either"
    FUNCTION = "made by the loss function, outside the model"
    DEAD = "a module puts out nothing but zeros"
    FLUSHED = "too small for float16 at this scale"


ADVICE: dict[Kind | Reason, str] = {
    Kind.BACKWARD: (
        "The lower scale helps by itself: a few such skips at the beginning, and one now and then, are how the "
        "scale finds its place. Where the scale keeps falling, take a mean instead of a sum in the loss."
    ),
    Kind.EARLIER: (
        "The lower scale helps by itself. The backward passes after it were wasted: all of them are skipped together."
    ),
    Kind.STALE: (
        "No scale can help: what is not finite stays so. Call optimizer.zero_grad() in every iteration, after a "
        "skipped step too."
    ),
    Kind.RANK: "This rank's gradients are finite. Ask on the rank that overflowed.",
    Kind.HALF: (
        "Loss scaling needs float32 parameters. Keep the module in float32 (.float()) and let autocast choose the "
        "half-precision operators."
    ),
    Kind.ZERO: "Nothing is learnt there. See which module puts out only zeros, or whether its output is used at all.",
    Kind.CLIPPED: (
        "Call `scaler.unscale_(optimizer)` between `backward()` and the clipping. `lucid.amp.GradScaler` does both in "
        "one call, `scaler.clip_grad_norm_(optimizer, max_norm)`, and returns the true norm."
    ),
    Kind.BYPASSED: "Call `scaler.step(optimizer)` instead of `optimizer.step()`, and `scaler.update()` after it.",
    Kind.UNSCALED: "Call `scaler.scale(loss).backward()` instead of `loss.backward()`.",
    Kind.UNKNOWN: (
        "Whether the loss itself was finite is not known. "
        "diagnosis.watch(model, scaler), called before training, keeps what tells it."
    ),
    Kind.LOSS: "No scale can help.",
    Reason.BATCH: "No scale can help. Mend the data, or leave such samples out.",
    Reason.WEIGHTS: "No scale can help. Go back to a checkpoint whose weights are finite.",
    Reason.DIVERGED: "No scale can help. The training has diverged: lower the learning rate, warm it up, or clip.",
    Reason.RANGE: (
        "No scale can help: the loss scale moves the backward only. Compute this module in float32 "
        "(autocast(enabled=False) around it, its inputs .float()), make its inputs or weights smaller, or use bfloat16."
    ),
    Reason.PRECISION: (
        "No scale can help. Compute this module in float32 (autocast(enabled=False) around it, its inputs .float()). "
        "Where it holds a small constant: float16 knows nothing between 0 and 6e-8, so an eps of 1e-8 is 0."
    ),
    Reason.FORMULA: (
        "No scale and no precision can help: look for a logarithm, a division or a root of zero in this module."
    ),
    Reason.FUNCTION: (
        "No scale can help. Look for a target that is not finite, and for a logarithm or a division of zero in the "
        "loss function; compute it in float32."
    ),
    Reason.DEAD: (
        "No scale can help. A ReLU whose inputs are all negative passes nothing on: lower the learning rate, begin "
        "anew, or use an activation that is not flat."
    ),
    Reason.FLUSHED: "Raise the scale: diagnosis.ranges(model, scaler) says to what.",
}
"""What to do next, by the closest word that is known."""
