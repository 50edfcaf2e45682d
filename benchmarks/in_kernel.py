"""Where should a fused optimizer's gradients be divided: inside its kernel, or before it?

Times step and update of PyTorch's scaler, of lucid's with the division inside the kernel, and of lucid's before it;
in turn in one process, on gradients that are put back before each. Prints medians, and the medians of the ratios within
a round.

usage: python benchmarks/in_kernel.py [--device cuda] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any
from unittest import mock

import torch
from clock import seconds
from torch.nn import Parameter

from lucid.amp import GradScaler, _fused

SETS = {
    "500 of 128x128": [(128, 128)] * 500,
    "100 of 256x256": [(256, 256)] * 100,
    "60 of 512x512": [(512, 512)] * 60,
    "50 of 1024x1024": [(1024, 1024)] * 50,
}
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
SCALES = (65536.0, 3.0)


def measured(name: str, kind: str, scale: float, rounds: int, device: torch.device) -> list[float]:
    """Time the three and return their medians in milliseconds, then torch / before and inside / before."""
    parameters = [Parameter(torch.zeros(shape, device=device)) for shape in SETS[name]]
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer: Any = OPTIMIZERS[kind](parameters, lr=1e-9, fused=True)
    theirs, ours = torch.amp.GradScaler(device.type, init_scale=scale), GradScaler(scale)
    theirs.scale(torch.ones((), device=device))
    times: list[list[float]] = [[], [], []]
    for round_ in range(rounds + 2):
        for taken, scaler, inside in zip(times, (theirs, ours, ours), (True, True, False), strict=True):
            for gradient in gradients:
                gradient.fill_(1.0)

            def end(scaler: Any = scaler) -> None:
                scaler.step(optimizer)
                scaler.update()

            with mock.patch.object(_fused, "saves", lambda *_, inside=inside: inside):
                elapsed = seconds(end, device) * 1e3
            if round_ >= 2:
                taken.append(elapsed)
    ratios = [statistics.median(a / b for a, b in zip(other, times[2], strict=True)) for other in times[:2]]
    return [*map(statistics.median, times), *ratios]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is timed")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}; milliseconds, medians")
    columns = ("torch", "inside", "before", "torch/before", "inside/before")
    print(f"{'gradients':16} {'optimizer':9} {'scale':>8}", *(f"{column:>13}" for column in columns))
    for scale in SCALES:
        for kind in OPTIMIZERS:
            for name in SETS:
                row = measured(name, kind, scale, arguments.rounds, device)
                print(f"{name:16} {kind:9} {scale:8.0f}", *(f"{number:13.2f}" for number in row), flush=True)


if __name__ == "__main__":
    main()
