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
        everywhere: what makes every rank tell its causes.
        unknown: what to do where nobody listened.
        own: advice that differs from what a call in a script is told.
    """

    keep: str
    no_replay: str
    everywhere: str
    unknown: str
    own: Mapping[Kind | Reason, str] = field(default_factory=dict)

    def advice(self, kind: Kind, reason: Reason | None) -> str:
        """What to do next, by the closest word that is known."""
        word = kind if reason is None else reason
        return self.own.get(word) or ADVICE[word]


CALLS = Tool(
    keep="watch(model, scaler, keep={})",
    no_replay="watch() was told replay=False",
    everywhere="call diagnosis.watch(model, scaler) on every rank",
    unknown="Call diagnosis.watch(model, scaler) before training, then ask again.",
)

_UNWATCHED = (
    "It is known where lucid-amp run watches the model: without --no-watch, and where the script itself calls the "
    "model, uncompiled, on its main thread."
)

RUN = Tool(
    keep="lucid-amp run --keep {}",
    no_replay="--no-replay was given",
    everywhere="start every rank with lucid-amp run",
    unknown=_UNWATCHED,
    own={
        Kind.UNKNOWN: f"Whether the loss itself was finite is not known. {_UNWATCHED}",
        Reason.FLUSHED: "Raise the scale: the table of the gradients' ranges says to what.",
    },
)
