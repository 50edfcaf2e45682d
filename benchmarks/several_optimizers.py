"""What do several optimizers in one iteration cost, beside PyTorch's scaler?

Times whole iterations (every optimizer's step, then update) with optimizers that do nothing, on plain gradients of 64
elements: PyTorch's scaler and lucid's in turn in one process. Prints medians, and the median of the pairwise ratios.

usage: python benchmarks/several_optimizers.py [--device cuda] [--pairs N]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from clock import seconds
from linear_cost import Still
from torch.nn import Parameter

from lucid.amp import GradScaler

# How many optimizers, of how many parameters each: one, a few beside each other, one a layer, one for each parameter.
CASES = ((1, 300), (2, 150), (2, 2000), (5, 100), (100, 20), (300, 1))


def iteration(scaler: Any, optimizers: list[Still]) -> Callable[[], None]:
    """The end of an iteration; at scale 1 the gradients stay what they are."""

    def run() -> None:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    return run


def measured(count: int, each: int, pairs: int, device: torch.device) -> tuple[float, float, float]:
    """The medians of PyTorch's and lucid's milliseconds, and of their ratios."""
    optimizers = []
    for _ in range(count):
        parameters = [Parameter(torch.zeros(64, device=device)) for _ in range(each)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizers.append(Still(parameters))
    theirs = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=10**9)
    theirs.scale(torch.ones((), device=device))
    runs = [iteration(scaler, optimizers) for scaler in (theirs, GradScaler(1.0, growth_interval=10**9))]
    times = [[seconds(run, device) * 1e3 for run in runs] for _ in range(pairs + 3)][3:]
    columns = [statistics.median(column) for column in zip(*times, strict=True)]
    return columns[0], columns[1], statistics.median(a / b for a, b in times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=51, help="how often each is timed")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}; milliseconds, medians")
    print(f"{'optimizers':>10} {'parameters each':>16} {'torch':>8} {'lucid':>8} {'torch/lucid':>12}")
    for count, each in CASES:
        theirs, ours, ratio = measured(count, each, arguments.pairs, device)
        print(f"{count:10} {each:16} {theirs:8.2f} {ours:8.2f} {ratio:12.2f}", flush=True)


if __name__ == "__main__":
    main()
