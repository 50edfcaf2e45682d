"""Whose words a next move is told in: those of a call in a script, or of ``lucid-amp run``.

Knows how each tool calls what it can do. Refuses to know when a move is advised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lucid.amp.diagnosis._kinds import ADVICE, Kind, Reason

__all__ = ["CALLS", "RUN", "Tool"]


@dataclass(frozen=True)
class Tool:
    """How a user does what is advised.

    Attributes:
        keep: what keeps the inputs of ``{}`` backward passes.
        no_replay: what made that no forward is run again.
        replay: what would make it run again, as a sentence.
        everywhere: what makes every rank tell its causes.
        watch: what makes that a model is watched, as a sentence.
        own: advice that differs from what a call in a script is told.
    """

    keep: str
    no_replay: str
    replay: str
    everywhere: str
    watch: str
    own: Mapping[Kind | Reason, str] = field(default_factory=dict)

    def advice(self, kind: Kind, reason: Reason | None) -> str:
        """What to do next, by the closest word that is known."""
        word = kind if reason is None else reason
        return self.own.get(word) or ADVICE[word]


CALLS = Tool(
    keep="watch(model, scaler, keep={})",
    no_replay="watch() was told replay=False",
    replay="Without replay=False the layer is told in which it begins.",
    everywhere="call diagnosis.watch(model, scaler) on every rank",
    watch="Call diagnosis.watch(model, scaler) before training, then ask again.",
)

_WATCHES = (
    "lucid-amp run watches a model where it is not told --no-watch, and where the script itself calls the model, "
    "on its main thread."
)

RUN = Tool(
    keep="lucid-amp run --keep {}",
    no_replay="--no-replay was given",
    replay="Without --no-replay the layer is told in which it begins.",
    everywhere="start every rank with lucid-amp run",
    watch=_WATCHES,
    own={
        Kind.UNKNOWN: f"Whether the loss itself was finite is known where the model is watched. {_WATCHES}",
        Reason.FLUSHED: "Raise the scale: the table of the gradients' ranges says to what.",
    },
)
