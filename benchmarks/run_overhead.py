"""What does ``lucid-amp run`` add to a training step, at its default settings?

Trains one transformer in stretches of 100 steps, watched and not watched in turn in one process. A stretch is as
long as the default distance of two samples, so that each watched one pays for one sample, for noticing the model,
and for every line that is written. Prints the medians and the median of the ratios of neighbours. The report, drawn
once after a script's end, is timed apart.

usage: python benchmarks/run_overhead.py [--device cuda] [--pairs N] [--threads N] [--scaler torch|lucid] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lucid.amp import GradScaler
from lucid.amp.cli import report
from lucid.amp.cli.run import EVERY
from lucid.amp.cli.run._folder import Folder
from lucid.amp.cli.run._log import Options
from lucid.amp.cli.run._observer import Observer
from lucid.amp.cli.run._script import Script

# Layers, width, batch, tokens: small on a processor, so that what is added weighs more than in real trainings.
SIZES = {"cpu": (3, 128, 8, 64), "cuda": (12, 768, 8, 512)}


class Transformer(nn.Module):
    """Embedding, encoder layers, head over 256 characters."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the character behind each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


class Training:
    """A model with its optimizer, and stretches of steps whose time is taken."""

    def __init__(self, device: str, scaler: str) -> None:
        torch.manual_seed(0)
        layers, width, rows, tokens = SIZES[device]
        self.device, self.kind = device, scaler
        self.model = Transformer(layers, width).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(256, (rows, tokens + 1), device=device)

    def stretch(self, steps: int, folder: Path | None) -> float:
        """Seconds a step over so many steps, watched where there is a folder to write to."""
        if folder is None:
            return self._timed(steps)
        folder.mkdir()
        observer = Observer(Script("train.py", (), is_module=False), Folder(folder), Options())
        try:
            with observer:
                return self._timed(steps)
        finally:
            observer.end("exit 0")

    def _timed(self, steps: int) -> float:
        scaler: Any = GradScaler() if self.kind == "lucid" else torch.amp.GradScaler(self.device)
        # On a processor the process's own time: what else runs on the machine does not count.
        clock = time.process_time if self.device == "cpu" else time.perf_counter
        self._wait()
        start = clock()
        for _ in range(steps):
            self.optimizer.zero_grad()
            # On a processor in float32, the fastest there: what is added must stand beside a step that is short.
            with torch.autocast(self.device, torch.float16, enabled=self.device != "cpu"):
                logits = self.model(self.batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
        self._wait()
        return (clock() - start) / steps

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize()


def measured(device: str, scaler: str, pairs: int) -> dict[str, float]:
    """Milliseconds a step without and with watching, their ratio, and the seconds that a report takes."""
    training = Training(device, scaler)
    training.stretch(10, None)
    plain, watched = [], []
    with tempfile.TemporaryDirectory() as name:
        for pair in range(pairs):
            # Who comes first changes, so that a machine that grows warm favours neither.
            for turn in (0, 1):
                if (turn + pair) % 2:
                    watched.append(training.stretch(EVERY, Path(name) / str(pair)))
                else:
                    plain.append(training.stretch(EVERY, None))
        start = time.perf_counter()
        report.draw(Path(name) / "0")
        drawing = time.perf_counter() - start
    return {
        "plain_ms": 1000 * statistics.median(plain),
        "watched_ms": 1000 * statistics.median(watched),
        "ratio": statistics.median(one / other for one, other in zip(watched, plain, strict=True)),
        "report_s": drawing,
    }


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scaler", choices=("torch", "lucid"), action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {name: measured(options.device, name, options.pairs) for name in options.scaler or ("torch", "lucid")}
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'scaler':8}{'alone, ms':>12}{'watched, ms':>14}{'ratio':>8}{'report, s':>12}")
    for name, row in rows.items():
        print(f"{name:8}{row['plain_ms']:12.1f}{row['watched_ms']:14.1f}{row['ratio']:8.3f}{row['report_s']:12.1f}")


if __name__ == "__main__":
    main()
