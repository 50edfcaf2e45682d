"""The folder that a run leaves: which one it is, and what each file in it is called.

Knows names, and how the processes of one job find the same folder. Refuses to know what the files say.

    run.json         the command, when, with what, how it ended; the scalers and models that were seen
    updates.jsonl    every update of the first scaler (updates-2.jsonl of the second, …)
    causes.jsonl     what was found out about skips
    ranges.json      the first and the latest sample of the gradients' ranges
    batch.pt         with --save-batch: the model inputs at which a loss stopped being finite
    scale.png, ranges.png, report.html

Rank 1 of a job puts ``.rank1`` before the ending of what it writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lucid.amp.cli import Refusal

NAME = "lucid-run"


@dataclass
class Folder:
    """Where one process of a run writes.

    Attributes:
        path: the folder.
        rank: this process's rank in its job, 0 where it is alone.
        world: how many processes the job has.
        process: the process that writes.
    """

    path: Path
    rank: int = 0
    world: int = 1
    process: int = field(default_factory=os.getpid)

    @classmethod
    def choose(cls, out: str | None) -> Folder:
        """The folder that was asked for, else ``lucid-run``, ``lucid-run-2``, … whichever is the first unused.

        Raises:
            Refusal: the folder cannot be made, or is a file.
        """
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if out is not None or rank == 0:
            path = Path(out) if out is not None else _first_unused()
            _make(path)
        else:
            path = _folder_of_rank_0()
        return cls(path.resolve(), rank, world)

    def is_mine(self) -> bool:
        """Whether this is the process that chose the folder, not a child that it forked."""
        return os.getpid() == self.process

    def file(self, name: str, number: int = 0) -> Path:
        """Where this rank's file of that name lies; ``number`` counts scalers from 0."""
        stem, ending = os.path.splitext(name)
        more = f"-{number + 1}" if number else ""
        rank = f".rank{self.rank}" if self.rank else ""
        return self.path / f"{stem}{more}{rank}{ending}"

    def withdraw(self) -> None:
        """Take back what was made for a script that did not start."""
        self.file("run.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it held something before
            self.path.rmdir()

    def write_run(self, facts: dict[str, Any]) -> None:
        """Write ``run.json`` in one go: there is always a whole one."""
        if not self.is_mine():
            return
        place = self.file("run.json")
        new = place.with_name(f"{place.name}.new")
        new.write_text(json.dumps({"job": _job(), **facts}, indent=1, default=str) + "\n")
        os.replace(new, place)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(
            f"cannot write to the folder {str(path)!r}: {error.strerror}; give another one with --out"
        ) from None
    if not os.access(path, os.W_OK):
        raise Refusal(f"cannot write to the folder {str(path)!r}: no permission; give another one with --out")


def _first_unused() -> Path:
    number, path = 1, Path(NAME)
    while path.exists():
        number += 1
        path = Path(f"{NAME}-{number}")
    return path


def _job() -> list[str]:
    """What the processes of one job have in common, and no other job on this machine has at the same time."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
    return [*(os.environ.get(name, "") for name in names), str(os.getppid())]


def _folder_of_rank_0() -> Path:
    """The newest folder here that rank 0 of this job has made; where it comes late, a folder of one's own."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = [place for place in Path().glob(f"{NAME}*/run.json") if _is_ours(place)]
        if found:
            return max(found, key=lambda place: place.stat().st_mtime).parent
        time.sleep(0.05)
    path = Path(f"{NAME}-rank{os.environ['RANK']}")
    _make(path)
    return path


def _is_ours(place: Path) -> bool:
    try:
        facts = json.loads(place.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and facts.get("job") == _job() and facts.get("ended") is None
