"""What does loss scaling cost between backward and the optimizer's step, beside PyTorch's scaler and beside none?

Times four ways to end an iteration in turn in one process, on gradients that are put back before each: PyTorch's
scaler, lucid's, float32 without a scaler, and the optimizer's step alone, which is a part of the other three. Prints
medians, medians of pairwise ratios, and the ratio of the medians of what the scalers add to the step alone. On CUDA it
also prints how many bytes a second the gradients' passes come to, against a device-to-device copy.

With ``--out`` it draws both scalers' times over those without a scaler.

usage: python benchmarks/gradient_path.py [--device cuda] [--pairs N] [--set NAME ...] [--optimizer NAME ...] [--json]
                                          [--out FILE.png]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from clock import seconds
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from lucid.amp import GradScaler

HEAD = "{:26} {:11} {:4} {:>8} {:>8} {:>8} {:>8} {:>11} {:>10} {:>10} {:>6}"
LINE = "{:26} {:11} {:4} {:8.2f} {:8.2f} {:8.2f} {:8.2f} {:11.2f} {:10.2f} {:10.2f} {:>6}"
TITLES = (
    "gradients",
    "optimizer",
    "clip",
    "torch",
    "lucid",
    "none",
    "step",
    "torch/lucid",
    "lucid/none",
    "added",
    "TB/s",
)
SCALE = 2.0**16
MAX_NORM = 1.0


def gpt2_small() -> list[tuple[int, ...]]:
    """The 148 shapes of GPT-2 small (124 million parameters): Radford et al. 2019, tied output embedding."""
    width, tokens, positions = 768, 50257, 1024
    block: list[tuple[int, ...]] = [
        *[(width,)] * 2,
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        *[(width,)] * 2,
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    ]
    return [(tokens, width), (positions, width), *block * 12, (width,), (width,)]


SETS: dict[str, list[tuple[int, ...]]] = {
    "50 of 1024x1024": [(1024, 1024)] * 50,
    "5000 of 64": [(64,)] * 5000,
    "60 of 512x512, 200 of 512": [(512, 512)] * 60 + [(512,)] * 200,
    "GPT-2 small": gpt2_small(),
    "1e9 parameters": [(4096, 4096)] * 59 + [(10_137_600,)],
}
DEFAULT_SETS = {"cpu": list(SETS)[:4], "cuda": list(SETS)}
OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-6, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
}


class Row(NamedTuple):
    """One line of the table; times in milliseconds, ratios as medians over pairs, that of what is added of medians."""

    tensors: str
    optimizer: str
    clip: bool
    torch_ms: float
    lucid_ms: float
    none_ms: float
    step_ms: float
    torch_over_lucid: float
    lucid_over_none: float
    added_torch_over_lucid: float
    torch_over_none: float


class Rival:
    """One way to end an iteration: gradients go in scaled or true, parameters come out stepped."""

    def __init__(self, parameters: list[Parameter], optimizer: torch.optim.Optimizer, clip: bool) -> None:
        self.parameters, self.optimizer, self.clip = parameters, optimizer, clip

    def clip_true(self) -> None:
        """Clip gradients that hold their true values."""
        if self.clip:
            clip_grad_norm_(self.parameters, MAX_NORM)


class WithoutScaler(Rival):
    """float32: clip, step."""

    scale = 1.0

    def end(self) -> None:
        """End the iteration."""
        self.clip_true()
        self.optimizer.step()


class StepAlone(Rival):
    """The optimizer's step, on true gradients that nobody looked at."""

    scale = 1.0

    def end(self) -> None:
        """End the iteration."""
        self.optimizer.step()


class WithTorch(Rival):
    """PyTorch's scaler: unscale, clip, step, update."""

    scale = SCALE

    def __init__(self, parameters: list[Parameter], optimizer: torch.optim.Optimizer, clip: bool) -> None:
        super().__init__(parameters, optimizer, clip)
        device = parameters[0].device
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=10**6)
        self.scaler.scale(torch.ones((), device=device))

    def end(self) -> None:
        """End the iteration."""
        if self.clip:
            self.scaler.unscale_(self.optimizer)
        self.clip_true()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class WithLucid(Rival):
    """lucid's scaler: unscale and clip at once, step, update."""

    scale = SCALE

    def __init__(self, parameters: list[Parameter], optimizer: torch.optim.Optimizer, clip: bool) -> None:
        super().__init__(parameters, optimizer, clip)
        self.scaler = GradScaler(init_scale=SCALE, growth_interval=10**6)

    def end(self) -> None:
        """End the iteration."""
        if self.clip:
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """How long a call takes until the device is done."""
    if device.type != "cuda":
        return seconds(function, device) * 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def measured(name: str, kind: str, clip: bool, pairs: int, device: torch.device) -> Row:
    """Time the four ways in turn on one set of tensors and one optimizer."""
    generator = torch.Generator(device=device).manual_seed(0)
    parameters = [Parameter(torch.zeros(shape, device=device)) for shape in SETS[name]]
    # Every way pays for the same copy back before it is timed; its own gradients it may change.
    true = [torch.randn(p.shape, device=device, generator=generator).mul_(1e-3) for p in parameters]
    for parameter, gradient in zip(parameters, true, strict=True):
        parameter.grad = gradient.clone()
    optimizer = OPTIMIZERS[kind](parameters)
    rivals = [way(parameters, optimizer, clip) for way in (WithTorch, WithLucid, WithoutScaler, StepAlone)]
    times: list[list[float]] = [[], [], [], []]
    for round_ in range(pairs + 2):
        for rival, taken in zip(rivals, times, strict=True):
            put_back(parameters, true, rival.scale)
            elapsed = milliseconds(rival.end, device)
            if round_ >= 2:
                taken.append(elapsed)
    theirs, ours, none, step = times
    return Row(
        name,
        kind,
        clip,
        *(statistics.median(taken) for taken in times),
        statistics.median(a / b for a, b in zip(theirs, ours, strict=True)),
        statistics.median(b / c for b, c in zip(ours, none, strict=True)),
        added(theirs, step) / added(ours, step) if added(ours, step) > 0 else math.nan,
        statistics.median(a / c for a, c in zip(theirs, none, strict=True)),
    )


def added(taken: list[float], step: list[float]) -> float:
    """The median of what a way takes beyond the step alone, pair by pair."""
    return statistics.median(a - d for a, d in zip(taken, step, strict=True))


def put_back(parameters: list[Parameter], true: list[Tensor], scale: float) -> None:
    """Give every parameter its gradient, times the scale."""
    with torch.no_grad():
        for parameter, gradient in zip(parameters, true, strict=True):
            assert parameter.grad is not None
            torch.mul(gradient, scale, out=parameter.grad)


def rows(arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Measure all that was asked for."""
    for name in arguments.set or DEFAULT_SETS.get(device.type, DEFAULT_SETS["cpu"]):
        for kind in arguments.optimizer or OPTIMIZERS:
            for clip in (False, True):
                yield measured(name, kind, clip, arguments.pairs, device)


def bandwidth(device: torch.device) -> float:
    """Bytes read and written by a device-to-device copy of 4 GiB, in TB/s."""
    source = torch.zeros(2**30, device=device)
    target = torch.empty_like(source)
    taken = [milliseconds(lambda: target.copy_(source), device) for _ in range(12)][2:]
    return 2 * source.nbytes / statistics.median(taken) / 1e9


def reach(row: Row) -> str:
    """The bytes that clipping's passes move (two reads and one write of every gradient), in TB/s."""
    elements = sum(torch.Size(shape).numel() for shape in SETS[row.tensors])
    return f"{3 * 4 * elements / (row.lucid_ms - row.step_ms) / 1e9:.2f}" if row.lucid_ms > row.step_ms else ""


def draw(measured_rows: list[Row], path: str, title: str) -> None:
    """Bars of both scalers' times over float32's without a scaler, with clipping and without."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 6), layout="constrained", sharey=True)
    for axis, clip in zip(axes, (True, False), strict=True):
        chosen = [row for row in measured_rows if row.clip is clip][::-1]
        places = range(len(chosen))
        theirs = [row.torch_over_none for row in chosen]
        axis.barh([place + 0.2 for place in places], theirs, 0.38, color="#c9a227", label="PyTorch's scaler")
        ours = [row.lucid_over_none for row in chosen]
        axis.barh([place - 0.2 for place in places], ours, 0.38, color="#2a6f97", label="lucid's scaler")
        axis.axvline(1.0, color="black", linewidth=1, label="float32 without a scaler")
        axis.set_yticks(places, [f"{row.tensors}, {row.optimizer}" for row in chosen])
        axis.set_xlabel(f"{'clip and step' if clip else 'step'}: time over float32's without a scaler")
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=15, help="how often each way is timed")
    parser.add_argument("--set", action="append", choices=list(SETS), help="may be repeated")
    parser.add_argument("--optimizer", action="append", choices=list(OPTIMIZERS), help="may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--out", default=None, help="draw into this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if not arguments.json:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}; milliseconds, medians")
        if device.type == "cuda":
            print(f"{torch.cuda.get_device_name(device)}; a device-to-device copy: {bandwidth(device):.2f} TB/s")
        print(HEAD.format(*TITLES))
    found = []
    for row in rows(arguments, device):
        found.append(row)
        if arguments.json:
            print(json.dumps(row._asdict()), flush=True)
        else:
            on_cuda = device.type == "cuda" and row.clip
            rate = reach(row) if on_cuda else ""
            print(LINE.format(*row[:2], "yes" if row.clip else "no", *row[3:-1], rate), flush=True)
    if arguments.out:
        draw(
            found,
            arguments.out,
            f"What loss scaling costs at the end of an iteration ({device}, torch {torch.__version__})",
        )


if __name__ == "__main__":
    main()
