"""Does the cost of an iteration's end grow linearly, in elements and in tensors?

Times ``clip_grad_norm_`` with ``step``, and ``step`` alone, over growing numbers of elements (in tensors of a million)
and of tensors (of 64 elements each), with an optimizer that does nothing, and draws both on logarithmic axes. The
parameters are frozen for Python's collector (``gc.freeze()``), which would walk through all of them every other step.

usage: python benchmarks/linear_cost.py [--device cuda] [--most-elements 1e8] [--most-tensors 1e5] [--out FILE.png]
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable

import torch
from clock import seconds
from torch.nn import Parameter

from lucid.amp import GradScaler

Point = tuple[int, float, float]


class Still(torch.optim.Optimizer):
    """An optimizer that does nothing, so that what is timed is the scaler."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Do nothing."""


def timed(sizes: list[int], device: torch.device, repeats: int = 7) -> tuple[float, float]:
    """The medians of stepping without and with clipping, in milliseconds."""
    parameters = [Parameter(torch.zeros(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer, scaler = Still(parameters), GradScaler(1.0, growth_interval=10**9)
    gc.freeze()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    def clip_and_step() -> None:
        scaler.clip_grad_norm_(optimizer, 1e-4)
        step()

    medians = []
    for run in (step, clip_and_step):
        taken = [seconds(run, device) for _ in range(repeats + 2)][2:]
        medians.append(statistics.median(taken) * 1e3)
    gc.unfreeze()
    return medians[0], medians[1]


def growing(least: float, most: float) -> list[int]:
    """Numbers from least to most, three in each power of ten."""
    numbers, number = [], least
    while number <= most * 1.01:
        numbers.append(round(number))
        number *= 10 ** (1 / 3)
    return numbers


def draw(elements: list[Point], tensors: list[Point], path: str, title: str) -> None:
    """Both curves beside each other; a line of slope one goes through the last point of each."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, points, label in zip(axes, (elements, tensors), ("elements", "tensors of 64 elements"), strict=True):
        counts = [point[0] for point in points]
        for column, marker, name in ((2, "s-", "clip and step"), (1, "o-", "step")):
            axis.loglog(counts, [point[column] for point in points], marker, label=name, markersize=4)
        slope = [points[-1][2] * count / counts[-1] for count in counts]
        axis.loglog(counts, slope, ":", color="grey", label="linear")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms beyond the optimizer's step")
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most-elements", type=float, default=1e8)
    parser.add_argument("--most-tensors", type=float, default=1e5)
    parser.add_argument("--out", default=None, help="draw into this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}; milliseconds, medians of 7")
    tables: list[list[Point]] = []
    for name, counts, sizes in (
        ("elements", growing(1e6, arguments.most_elements), lambda count: [10**6] * (count // 10**6)),
        ("tensors", growing(1e2, arguments.most_tensors), lambda count: [64] * count),
    ):
        print(f"{name:>12} {'step':>10} {'clip+step':>10}")
        tables.append([])
        for count in counts:
            tables[-1].append((count, *timed(sizes(count), device)))
            print("{:12d} {:10.3f} {:10.3f}".format(*tables[-1][-1]), flush=True)
    if arguments.out:
        title = f"What the scaler costs as elements and tensors grow ({device}, torch {torch.__version__})"
        draw(*tables, arguments.out, title)


if __name__ == "__main__":
    main()
