"""What do scale, step and update cost on a model of two parameters, beyond the bare optimizer step?

Times the bare step, PyTorch's scaler and lucid's in turn in one process, in an order drawn anew each round, so that
nobody always follows the same one and finds what it left in the caches: single iterations, each of which finds the
caches as another left them, and rows of a hundred, as in a script that has one scaler. Prints the medians of what each
scaler adds to an iteration, and the median of the ratios within a round.

usage: python benchmarks/fixed_cost.py [--device cuda] [--pairs N] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from clock import seconds
from torch.nn import Parameter

from lucid.amp import GradScaler

OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
}


def iteration(scaler: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> Callable[[], None]:
    """One scaled iteration without forward and backward."""

    def run() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    return run


def row(run: Callable[[], object], length: int) -> Callable[[], None]:
    """So many iterations, one after the other."""

    def runs() -> None:
        for _ in range(length):
            run()

    return runs


def measured(kind: str, length: int, pairs: int, device: torch.device) -> dict[str, Any]:
    """Time rows of the three in turn and return medians in microseconds an iteration."""
    parameters = [Parameter(torch.zeros(shape, device=device)) for shape in ((4, 4), (4,))]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = OPTIMIZERS[kind](parameters)
    loss = torch.ones((), device=device, requires_grad=True)
    runs = [
        optimizer.step,
        iteration(torch.amp.GradScaler(device.type), optimizer, loss),
        iteration(GradScaler(), optimizer, loss),
    ]
    rows = [row(run, length) for run in runs]
    times: list[list[float]] = [[], [], []]
    draw = random.Random(0)
    for round_ in range(pairs + 50):
        for index in draw.sample(range(3), 3):
            elapsed = seconds(rows[index], device) * 1e6 / length
            if round_ >= 50:
                times[index].append(elapsed)
    bare, theirs, ours = times
    added = [statistics.median(b - a for a, b in zip(bare, other, strict=True)) for other in (theirs, ours)]
    ratios = [(c - a) / (b - a) for a, b, c in zip(bare, theirs, ours, strict=True) if b > a]
    return {
        "optimizer": kind,
        "in_a_row": length,
        "bare_us": statistics.median(bare),
        "torch_adds_us": added[0],
        "lucid_adds_us": added[1],
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--pairs", type=int, default=2000, help="how often each iteration is timed alone; rows: a tenth"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if not arguments.json:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}; microseconds, medians")
        print(f"{'optimizer':12} {'in a row':>8} {'bare':>8} {'torch adds':>11} {'lucid adds':>11} {'lucid/torch':>12}")
    for kind, length in itertools.product(OPTIMIZERS, (1, 100)):
        found = measured(kind, length, arguments.pairs if length == 1 else max(1, arguments.pairs // 10), device)
        if arguments.json:
            print(json.dumps(found), flush=True)
        else:
            print(
                f"{kind:12} {length:8} {found['bare_us']:8.1f} {found['torch_adds_us']:11.1f} "
                f"{found['lucid_adds_us']:11.1f} {found['ratio']:12.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
