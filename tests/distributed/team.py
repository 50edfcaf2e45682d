"""Several processes that stay alive and run one function after another on all ranks.

Knows processes, pipes and gloo's rendezvous. Refuses to know what the functions test. A start costs seconds,
so one team serves many tests; where a rank failed or hung the team is dismissed: its collectives no longer match.
"""

import datetime
import importlib
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 30.0  # seconds that a collective waits for the other ranks


class RankError(Exception):
    """A function failed or hung on some rank: the tracebacks of all that did."""


class Team:
    """``size`` processes with a gloo group over all of them."""

    def __init__(self, size: int, patience: float = PATIENCE) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="team")
        self._patience = patience
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            rendezvous = pathlib.Path(self._folder.name, "rendezvous").as_uri()
            arguments = (there, rank, size, rendezvous, patience)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: str, *arguments: Any) -> list[Any]:
        """What a function, told as ``module.name``, returned on each rank for these arguments."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        return self.collect(time.monotonic() + 120)

    def collect(self, until: float) -> list[Any]:
        """The answers of all ranks, in order.

        Raises:
            RankError: with the tracebacks, after the whole team was dismissed.
        """
        answers = [self.answer(rank, until) for rank in range(len(self.pipes))]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.dismiss()
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    def answer(self, rank: int, until: float) -> tuple[bool, Any]:
        """Whether a rank returned, and what; or how it failed."""
        try:
            if self.pipes[rank].poll(max(until - time.monotonic(), 0)):
                return self.pipes[rank].recv()
            return False, "no answer: it hangs"
        except (EOFError, ConnectionError):
            return False, "the process ended"

    @property
    def alive(self) -> bool:
        """Whether every process still runs."""
        return all(process.is_alive() for process in self.processes)

    def dismiss(self) -> None:
        """Let the processes end, and end those that hang."""
        for pipe in self.pipes:
            pipe.close()
        until = time.monotonic() + 5
        for process in self.processes:
            process.join(max(until - time.monotonic(), 0))
            process.kill()
            process.join()
        self._folder.cleanup()


def named(function: str) -> Callable[..., Any]:
    """The function of this ``module.name``, imported where it runs: the tests' own process stays light."""
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _serve(pipe: Connection, rank: int, size: int, rendezvous: str, patience: float) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    timeout = datetime.timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, named(function)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
