"""What does a watch cost on a step that lands?

    python benchmarks/watch.py [--pairs 40] [--device cpu]

Trains a small transformer with each scaler, a step without and a step with ``diagnosis.watch`` in turn in one
process; prints the medians, their ratio as the median of pairs, and the same for four accumulated passes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lucid.amp import GradScaler
from lucid.amp.diagnosis import watch


def transformer(width: int, layers: int) -> nn.Module:
    """An encoder with dropout."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def stepper(make: Callable[[], Any], watched: bool, passes: int, device: str) -> Callable[[], None]:
    """One training step of a model of its own."""
    torch.manual_seed(0)
    model, scaler = transformer(128, 3).to(device), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if watched:
        watch(model, scaler)
    batch = torch.randn(16, 64, 128, device=device)

    def step() -> None:
        """Train on the batch."""
        optimizer.zero_grad()
        for _ in range(passes):
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                loss = model(batch).float().square().mean()
            scaler.scale(loss / passes).backward()
        scaler.step(optimizer)
        scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def seconds(step: Callable[[], None]) -> float:
    """How long one step takes."""
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    makers = {"lucid": GradScaler, "torch": lambda: torch.amp.GradScaler(arguments.device)}
    for name, make in makers.items():
        for passes in (1, 4):
            plain, watched = (stepper(make, on, passes, arguments.device) for on in (False, True))
            for step in (plain, watched) * 3:
                step()
            pairs = [(seconds(plain), seconds(watched)) for _ in range(arguments.pairs)]
            ratio = statistics.median(with_watch / without for without, with_watch in pairs)
            alone, both = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
            print(f"{name:>5}, {passes} backward(s) a step: {alone:.2f} ms, watched {both:.2f} ms, ratio {ratio:.3f}")


main()
