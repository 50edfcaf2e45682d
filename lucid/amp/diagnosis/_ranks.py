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

__all__ = ["heard", "tell"]

PATIENCE = 2.0
"""Seconds that one rank waits for another which took part before, or which it hears for the first time."""

_silent: set[tuple[int, int]] = set()


def tell(number: int, update: int, causes: list[dict[str, Any]]) -> None:
    """Leave this rank's causes for the others; what it left before is replaced.

    Args:
        number: of the scaler, the same on all ranks.
        update: which one had the skip.
        causes: as plain values.
    """
    store = _torch.common_store()
    if store is not None:
        store.set(_key(number, _models.rank()), json.dumps({"update": update, "causes": causes}))


def heard(number: int, update: int) -> tuple[list[dict[str, Any]], list[int]]:
    """The causes that the other ranks left for this update, and the ranks that left none.

    A rank that leaves none is waited for once, and never again until it does.
    """
    store = _torch.common_store()
    causes: list[dict[str, Any]] = []
    missing = []
    for rank in range(_models.ranks()):
        if rank == _models.rank():
            continue
        left = _wait(store, number, rank, update) if store is not None else None
        if left is None:
            missing.append(rank)
        else:
            causes += left
    return causes, missing


def _wait(store: Any, number: int, rank: int, update: int) -> list[dict[str, Any]] | None:
    end = time.monotonic() + (0.0 if (number, rank) in _silent else PATIENCE)
    while True:
        if store.check([_key(number, rank)]):
            told = json.loads(store.get(_key(number, rank)))
            if told["update"] == update:
                _silent.discard((number, rank))
                causes: list[dict[str, Any]] = told["causes"]
                return causes
            if told["update"] > update:
                return None
        if time.monotonic() >= end:
            _silent.add((number, rank))
            return None
        time.sleep(0.01)


def _key(number: int, rank: int) -> str:
    return f"lucid.amp.diagnosis/{number}/{rank}"
