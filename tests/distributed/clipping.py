"""What ranks do in the tests of the global norm; every function runs on all ranks of a team."""

import contextlib
import math
from typing import Any
from unittest import mock

import meshes
import torch
import torch.distributed as dist
from decisions import caught, own
from drill import SCALE, local, poison_gradient
from team import named
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from lucid.amp import GradScaler, _norms, _shares, _torch
from lucid.amp._division import Divisor
from lucid.amp._unread import Unread


def clip(layout: str, max_norm: float, norm_type: float, optimizer: str = "sgd") -> dict[str, Any]:
    """Clip one layout's gradients once; the norm, the gradients and whether the step lands."""
    spread = named(layout)(optimizer)
    scaler = GradScaler(init_scale=SCALE, process_group=spread.process_group)
    spread.backward(0, scaler)
    before = _locals(spread.optimizer)
    norm = scaler.clip_grad_norm_(spread.optimizer, max_norm, norm_type)
    ratios = _ratios(before, _locals(spread.optimizer))
    scaler.step(spread.optimizer)
    return {"norm": float(norm), "plain": type(norm) is Tensor, "ratios": ratios}


def clip_overflow(layout: str) -> dict[str, Any]:
    """One rank's gradients overflow before the clip."""
    spread = named(layout)("sgd")
    scaler = GradScaler(init_scale=SCALE, process_group=spread.process_group)
    spread.backward(0, scaler)
    if dist.get_rank() == dist.get_world_size() - 1:
        poison_gradient(spread.optimizer, 0)
    before = _locals(spread.optimizer)
    norm = scaler.clip_grad_norm_(spread.optimizer, 1e-3)
    ratios = _ratios(before, _locals(spread.optimizer))
    scaler.step(spread.optimizer)
    skipped = scaler.step_was_skipped(spread.optimizer)
    return {"norm": float(norm), "ratios": ratios, "skipped": skipped}


def by_hand(gradients: list[dict[str, list[float]]], norm_type: float) -> float:
    """The norm where each rank holds plain gradients under one given group."""
    mine = gradients[dist.get_rank()]
    parameters = []
    for number, values in enumerate(mine.values()):
        parameter = nn.Parameter(torch.full((len(values),), float(number)))
        parameter.grad = torch.tensor(values) * 8.0
        parameters.append(parameter)
    optimizer = torch.optim.SGD(parameters or [{"params": []}], lr=1.0)
    scaler = GradScaler(init_scale=8.0, process_group=dist.group.WORLD)
    return float(scaler.clip_grad_norm_(optimizer, math.inf, norm_type))


def refuse_while_clipping() -> dict[str, Any]:
    """The last rank meets a float16 gradient."""
    stray = dist.get_rank() == dist.get_world_size() - 1
    parameter = own(3, gradient=64.0, dtype=torch.float16 if stray else torch.float32)
    optimizer = torch.optim.SGD([("stray", parameter)], lr=1.0)
    scaler = GradScaler(init_scale=4.0, process_group=dist.group.WORLD)
    raised = caught(lambda: scaler.clip_grad_norm_(optimizer, 1.0))
    return {"raised": raised, "untouched": bool((parameter.grad == 64).all())}


def ask_wrongly(what: str) -> dict[str, Any]:
    """The last rank asks for what cannot be had, among it the norm of a parameter that its optimizer does not have."""
    wrong = dist.get_rank() == dist.get_world_size() - 1
    parameter, stranger = own(3, gradient=64.0), own(1, gradient=64.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=4.0, process_group=dist.group.WORLD)
    kinds: dict[str, dict[str, Any]] = {
        "a parameter of nobody": {"parameters": [stranger]},
        "no parameter": {"parameters": [None]},
        "order 0": {"norm_type": 0.0},
        "order NaN": {"norm_type": math.nan},
        "a negative bound": {"max_norm": -1.0},
        "another bound": {"max_norm": 2.0},
        "another order": {"norm_type": 1.0},
    }
    asked = {"max_norm": 1.0} | (kinds[what] if wrong else {})
    raised = caught(lambda: scaler.clip_grad_norm_(optimizer, **asked))
    untouched = bool((parameter.grad == 64).all())
    norm = float(scaler.clip_grad_norm_(optimizer, 1.0))
    return {"raised": raised, "untouched": untouched, "norm": norm}


def full(clips: bool, gradient: float, read: str) -> dict[str, Any]:
    """Memory runs out on the last rank while it reads its gradients, in one of the functions that do."""
    parameter = own(4, gradient=gradient)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=4.0, process_group=dist.group.WORLD)

    def call() -> None:
        if clips:
            scaler.clip_grad_norm_(optimizer, math.inf)
        scaler.step(optimizer)

    fails = mock.Mock(side_effect=MemoryError("no memory"))
    where = {"power": _norms, "write": Unread, "judge_quotients": Divisor, "_mark": _shares}[read]
    with mock.patch.object(where, read, fails) if dist.get_rank() else contextlib.nullcontext():
        raised = caught(call)
    untouched = bool((parameter.grad == gradient).all())
    call()
    return {"raised": raised, "untouched": untouched, "landed": parameter.tolist()}


def chained() -> float:
    """The norm under two groups that have one rank in common; each rank's gradient is its number, from 1 on."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [0, 3])]
    rank = dist.get_rank()
    mine = [group for group, ranks in zip(groups, ([0, 1, 2], [0, 3]), strict=True) if rank in ranks]
    optimizer = torch.optim.SGD([own(1, gradient=rank + 1.0)], lr=1.0)
    scaler = GradScaler(init_scale=1.0, process_group=mine)
    return float(scaler.clip_grad_norm_(optimizer, math.inf))


def narrow_and_wide() -> tuple[str, float]:
    """The norm where the last rank's gradients are bfloat16 and the other's float32."""
    dtype = torch.bfloat16 if dist.get_rank() else torch.float32
    optimizer = torch.optim.SGD([own(3, gradient=1.1 + dist.get_rank(), dtype=dtype)], lr=1.0)
    norm = GradScaler(1.0, process_group=dist.group.WORLD).clip_grad_norm_(optimizer, 1.0)
    return str(norm.dtype), float(norm)


def empty_shard() -> str:
    """Of the wider dtype rank 1 holds no element, and rank 0 has no such parameter."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
    if dist.get_rank() == 1:
        parameters.append(nn.Parameter(torch.zeros(0, dtype=torch.float64)))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    scaler = GradScaler(init_scale=8.0, process_group=dist.group.WORLD)
    return str(scaler.clip_grad_norm_(torch.optim.SGD(parameters, lr=1.0), math.inf).dtype)


def sums_beyond_float32() -> tuple[float, bool]:
    """Partial DTensor gradients of 3e38 on each of two ranks: finite addends, an infinite sum."""
    parameter = nn.Parameter(distribute_tensor(torch.ones(2), meshes.mesh(2), [Replicate()]))
    addends = torch.full((2,), 3e38)
    parameter.grad = DTensor.from_local(addends, parameter.device_mesh, [Partial()], run_check=False)
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.0), GradScaler(1.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    return float(norm), scaler.step_was_skipped(optimizer)


def subset() -> tuple[float, list[float]]:
    """The norm is asked of the first of two parameters; the second's gradient is only unscaled."""
    rank = dist.get_rank()
    first, second = own(1, gradient=8.0 * (3.0 + rank)), own(1, gradient=8.0 * 100.0)
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    scaler = GradScaler(init_scale=8.0, process_group=dist.group.WORLD)
    norm = scaler.clip_grad_norm_(optimizer, 2.5, parameters=[first])
    return float(norm), [first.grad.item(), second.grad.item()]


def hidden_nan(norm_type: float) -> tuple[float, bool]:
    """The last rank's float64 gradient is NaN beside a float32 one that is not, and that no other rank holds, too."""
    values = (1.0 + dist.get_rank(), math.nan if dist.get_rank() == dist.get_world_size() - 1 else 1.0)
    dtypes = (torch.float32, torch.float64)
    parameters = [own(2, gradient=value, dtype=dtype) for value, dtype in zip(values, dtypes, strict=True)]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    scaler = GradScaler(init_scale=4.0, process_group=dist.group.WORLD)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
    scaler.step(optimizer)
    return float(norm), scaler.step_was_skipped(optimizer)


def huge() -> tuple[float, bool]:
    """Finite gradients whose squares overflow float32, on every rank."""
    parameter = own(2, gradient=3e38 if dist.get_rank() == 0 else 2e38)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = GradScaler(init_scale=2.0**20, process_group=dist.group.WORLD)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    return float(norm), scaler.step_was_skipped(optimizer)


def stop_in_the_middle() -> dict[str, Any]:
    """Memory runs out between the divisions of a float32 and a float64 gradient, both 9 at scale 3."""
    parameters = [own(1, gradient=9.0, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = GradScaler(init_scale=3.0, process_group=dist.group.WORLD)
    divide, calls = _torch.divide_, iter([True])

    def second_raises(*args: Any) -> None:
        if not next(calls, False):
            raise MemoryError("no memory")
        divide(*args)

    with mock.patch.object(_torch, "divide_", second_raises):
        first = caught(lambda: scaler.clip_grad_norm_(optimizer, 1e9))
    again = caught(lambda: scaler.clip_grad_norm_(optimizer, 1e9))
    scaler.step(optimizer)
    gradients = sorted(parameter.grad.item() for parameter in parameters)
    return {"raised": [first, again], "gradients": gradients, "skipped": scaler.step_was_skipped(optimizer)}


def _locals(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [local(p.grad).detach().double().clone() for p in parameters if p.grad is not None]


def _ratios(before: list[Tensor], after: list[Tensor]) -> list[float]:
    """After over before where both are finite and not zero: the smallest and the largest."""
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    flat = torch.cat([ratio.flatten() for ratio in ratios])
    flat = flat[flat.isfinite() & (flat != 0)]
    return [float(flat.min()), float(flat.max())] if len(flat) else []
