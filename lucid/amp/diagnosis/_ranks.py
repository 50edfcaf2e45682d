"""Tell the other ranks why a step was skipped here, and hear it from them.

Knows the store through which the processes of a job found each other. There is no collective in it, so that
nobody hangs where only some of the ranks are watched. Refuses to know what a cause is.
"""

from __future__ import annotations

import json
import time
from typing import Any

from lucid.amp import _torch
from lucid.amp.diagnosis import _models

__all__ = ["begin", "heard", "tell"]

PATIENCE = 2.0
"""Seconds that one rank waits for another which took part before, or which it hears for the first time."""

_silent: set[tuple[str, int]] = set()


def begin(key: str) -> None:
    """A training begins: whatever an earlier one of that key left is replaced, and every rank is waited for again."""
    for waited in list(_silent):
        if waited[0] == key:
            _silent.discard(waited)
    tell(key, -1, [])


def tell(key: str, update: int, causes: list[dict[str, Any]]) -> None:
    """Leave this rank's causes for the others; what it left before is replaced.

    Args:
        key: what is trained, the same on all ranks.
        update: which one had the skip.
        causes: as plain values.
    """
    store = _torch.common_store()
    if store is not None:
        store.set(_place(key, _models.rank()), json.dumps({"update": update, "causes": causes}))


def heard(key: str, update: int) -> tuple[list[dict[str, Any]], list[int]]:
    """The causes that the other ranks left for this update, and the ranks that left none.

    A rank that leaves none is waited for once, and never again until it does.
    """
    store = _torch.common_store()
    causes: list[dict[str, Any]] = []
    missing = []
    for rank in range(_models.ranks()):
        if rank == _models.rank():
            continue
        left = _wait(store, key, rank, update) if store is not None else None
        if left is None:
            missing.append(rank)
        else:
            causes += left
    return causes, missing


def _wait(store: Any, key: str, rank: int, update: int) -> list[dict[str, Any]] | None:
    end = time.monotonic() + (0.0 if (key, rank) in _silent else PATIENCE)
    while True:
        if store.check([_place(key, rank)]):
            told = json.loads(store.get(_place(key, rank)))
            if told["update"] == update:
                _silent.discard((key, rank))
                causes: list[dict[str, Any]] = told["causes"]
                return causes
            if told["update"] > update:
                return None
        if time.monotonic() >= end:
            _silent.add((key, rank))
            return None
        time.sleep(0.01)


def _place(key: str, rank: int) -> str:
    return f"lucid.amp.diagnosis/{key}/{rank}"
