"""What a run writes down while the script trains.

Knows when to ask ``diagnosis`` and which file of the folder gets the answer. Whatever goes wrong here is noted and
told at the end: it never reaches the script. Refuses to know how a report looks.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
import time
import weakref
from typing import Any

import torch
from torch import nn

import lucid
from lucid.amp.cli.run._clipping import Call, Clipping
from lucid.amp.cli.run._folder import Folder
from lucid.amp.cli.run._harmless import harmless
from lucid.amp.cli.run._log import Options, PlainLog, ScalerLog
from lucid.amp.cli.run._notice import Notice
from lucid.amp.cli.run._script import Script
from lucid.amp.diagnosis._trace import ALL_FINITE

TOO_LATE = ("OMP_", "MKL_", "KMP_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""How the names of variables begin that PyTorch reads while it is loaded, which was before the script."""

AT_MOST = 32
"""So many models are watched."""


class Observer:
    """Watches the scalers and models of one process.

    Args:
        script: what is run.
        folder: where to write.
        options: how closely to look.
    """

    def __init__(self, script: Script, folder: Folder, options: Options) -> None:
        self.folder, self.options = folder, options
        self.notes: list[str] = []
        self.scalers: list[ScalerLog] = []
        self.plain = PlainLog(self)
        self.models: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = []
        self.facts: dict[str, Any] = {
            "command": [script.target, *script.arguments],
            "name": script.name,
            "started": time.time(),
            "ended": None,
            "ending": None,
            "lucid": lucid.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _device(),
            "rank": folder.rank,
            "world": folder.world,
        }
        self._variables = _variables()
        self._notice = Notice(self._scaler_made, self._model_called if options.watch else None)
        self._clipping = Clipping(self._clipped, lambda: any(log.scaling for log in self.scalers))

    def __enter__(self) -> Observer:
        self._write()
        self._notice.__enter__()
        self._clipping.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clipping.__exit__()
        self._notice.__exit__()

    def note(self, words: str) -> None:
        """Keep something that the reader of the report must know, once."""
        if words not in self.notes:
            self.notes.append(words)

    def end(self, ending: str) -> None:
        """Close all files; ``ending`` says how the script ended."""
        unsaved = self.unsaved()
        if unsaved:
            self.note(unsaved)
        for log in self.scalers:
            log.close()
        self.plain.close()
        changed = [name for name, value in _variables().items() if self._variables.get(name) != value]
        if changed:
            self.note(
                f"The script set {', '.join(changed)}. PyTorch was loaded before, and reads such a variable only then: "
                "set it outside of the script to have the same effect here."
            )
        self.facts.update(ended=time.time(), ending=ending)
        self._write()

    def unsaved(self) -> str:
        """Why the batch that was asked for was not saved; empty where it was, or none was asked for."""
        if not self.options.save_batch:
            return ""
        reasons = [log.unsaved() for log in self.scalers if log.enabled]
        if "" in reasons:
            return ""
        if not reasons:
            why = "No scaler was at work."
        elif not self.options.watch:
            why = "--no-watch was given, and inputs are kept where models are watched."
        else:
            why = max(reasons, key=lambda reason: reason != ALL_FINITE)
        return f"--save-batch wrote no batch. {why}"

    def _write(self) -> None:
        scalers = [log.facts for log in self.scalers]
        models = [facts for _, facts in self.models]
        self.folder.write_run({**self.facts, "scalers": scalers, "models": models, "notes": self.notes})

    @harmless
    def _scaler_made(self, scaler: Any) -> None:
        log = ScalerLog(self, scaler, len(self.scalers))
        self.scalers.append(log)
        if log.enabled:
            self.plain.close()
        for find, facts in self.models:
            log.watch(find(), facts["name"])
        self._write()

    def _clipped(self, call: Call) -> None:
        for log in self.scalers:
            log.clipped(call)

    @harmless
    def _model_called(self, model: nn.Module) -> None:
        if len(self.models) >= AT_MOST:
            self.note(f"The script called more than {AT_MOST} models; the first {AT_MOST} of them were watched.")
            return
        facts = _model_facts(model, [its["name"] for _, its in self.models])
        self.models.append((weakref.ref(model), facts))
        for log in self.scalers:
            log.watch(model, facts["name"])
        if not any(log.enabled for log in self.scalers):
            self.plain.sample(model, facts["name"])
        self._write()


def _model_facts(model: nn.Module, taken: list[str]) -> dict[str, Any]:
    parameters = list(model.parameters())
    name = _name_in_script(model) or type(model).__name__
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return {
        "name": next(free for free in names if free not in taken),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "devices": sorted({str(parameter.device) for parameter in parameters}),
    }


def _name_in_script(model: nn.Module) -> str | None:
    """What the script calls it, where that is a variable of the script itself."""
    names = vars(sys.modules["__main__"])
    return next((name for name, value in names.items() if value is model), None)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(TOO_LATE)}


def _device() -> str:
    """The machine's accelerator by name, else how many threads PyTorch uses on the CPU."""
    if torch.cuda.is_available():
        # Asking the driver by name would set CUDA up before the script does.
        return f"CUDA {torch.version.cuda or torch.version.hip}"
    return "Apple GPU" if torch.backends.mps.is_available() else "CPU"
