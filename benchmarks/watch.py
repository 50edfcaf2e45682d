"""What does a watch cost on a step that lands?

    python benchmarks/watch.py [--pairs 40] [--device cpu]

Trains a transformer (3 layers, 128 wide, 16 sequences of 64) with each scaler, a step without and a step with
``diagnosis.watch`` in turn in one process; prints the medians, their ratio as the median of pairs, and the same for
four accumulated passes. Then the fixed cost: what is added to a step of a model with two parameters. On a CPU it is
the process's own time that counts, whatever else the machine is doing.
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


def stepper(make: Callable[[], Any], watched: bool, passes: int, device: str, tiny: bool = False) -> Callable[[], None]:
    """One training step of a model of its own."""
    torch.manual_seed(0)
    model, scaler = (nn.Linear(128, 1) if tiny else transformer(128, 3)).to(device), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if watched:
        watch(model, scaler)
    batch = torch.randn(1 if tiny else 16, 64, 128, device=device)

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


def seconds(step: Callable[[], None], clock: Callable[[], float]) -> float:
    """How long one step takes."""
    begun = clock()
    step()
    return clock() - begun


def pairs(make: Callable[[], Any], device: str, count: int, **settings: Any) -> list[tuple[float, float]]:
    """The seconds of a step without and with a watch, in turn."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    plain, watched = (stepper(make, on, device=device, **settings) for on in (False, True))
    for step in (plain, watched) * 3:
        step()
    return [(seconds(plain, clock), seconds(watched, clock)) for _ in range(count)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    makers = {"lucid": GradScaler, "torch": lambda: torch.amp.GradScaler(arguments.device)}
    for name, make in makers.items():
        for passes in (1, 4):
            times = pairs(make, arguments.device, arguments.pairs, passes=passes)
            ratio = statistics.median(watched / plain for plain, watched in times)
            plain, watched = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
            print(
                f"{name:>5}, {passes} backward(s) a step: {plain:.2f} ms, watched {watched:.2f} ms, ratio {ratio:.3f}"
            )
        times = pairs(make, arguments.device, 10 * arguments.pairs, passes=1, tiny=True)
        added = 1e6 * statistics.median(watched - plain for plain, watched in times)
        print(f"{name:>5}, two parameters: a watch adds {added:.0f} µs a step")


main()
