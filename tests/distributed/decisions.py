"""What ranks do in the tests of refusals, counts and groups: small programs that return what they saw.

Every function runs on all ranks of a team. Knows the scaler and torch.distributed; judges nothing.
"""

import contextlib
import copy
import functools
import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import meshes
import reads
import torch
import torch.distributed as dist
from handmade import first_half
from network import batch, loss_of, net
from replicas import fsdp1
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lucid.amp import GradScaler
from lucid.amp._consensus import Consensus


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    """The class and the words of what the action raised; empty where it returned."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def own(*shape: int, gradient: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of ones with a gradient of one value."""
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.full(shape, gradient, dtype=dtype)
    return parameter


@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """Every collective of torch.distributed that is called, by name, with the bytes that it was given."""
    seen: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            # A list is where a gather puts what it hears.
            tensors = [a for a in (*arguments, *options.values()) if isinstance(a, Tensor)]
            seen.append((name, sum(t.numel() * t.element_size() for t in tensors)))
            return original(*arguments, **options)

        return call

    for name, original in originals.items():
        setattr(dist, name, watched(name, original))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "isend"))
    and callable(getattr(dist, name))
    and name != "all_gather_multigpu"
]


def refuse(dtype: torch.dtype | None, kind: str, grid: bool) -> dict[str, Any]:
    """The last rank meets a gradient of ``dtype`` (or an inference tensor); what every rank raised and changed."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    good = own(3, gradient=64.0)
    bad = own(3, gradient=64.0, dtype=dtype if rank == last and dtype else torch.float32)
    if rank == last and dtype is None:
        with torch.inference_mode():
            bad.grad = torch.ones(3)
    optimizer = torch.optim.SGD([("good", good), ("stray", bad)], lr=1.0)
    process_group = meshes.mesh(2, 2) if grid else dist.group.WORLD
    scaler = GradScaler(init_scale=4.0, process_group=process_group)
    raised = caught(lambda: getattr(scaler, kind)(optimizer))
    again = caught(lambda: getattr(scaler, kind)(optimizer))
    untouched = bool((good == 1).all() and (good.grad == 64).all())
    bad.grad = None
    scaler.step(optimizer)
    scaler.update()
    after = good.detach().clone()
    return {"raised": raised, "again": again, "untouched": untouched, "after": after, "scale": scaler.get_scale()}


def left_over() -> dict[str, Any]:
    """The last rank's fused optimizer has another scaler's factor; what every rank raised and changed, and a retry."""
    weight = own(3, gradient=64.0)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer.grad_scale = torch.ones(())
    scaler = GradScaler(init_scale=4.0, process_group=dist.group.WORLD)
    raised = caught(lambda: scaler.step(optimizer))
    untouched = bool((weight == 1).all() and (weight.grad == 64).all())
    optimizer.grad_scale = None
    scaler.step(optimizer)
    scaler.update()
    return {"raised": raised, "untouched": untouched, "after": weight.detach().clone()}


def fsdp1_without_group(use_orig_params: bool) -> tuple[str, str]:
    """FSDP1 and a scaler that was told of no group."""
    layout = fsdp1("sgd", use_orig_params)
    scaler = GradScaler()
    layout.backward(0, scaler)
    return caught(lambda: scaler.step(layout.optimizer))


def count(layout: str, given: bool) -> dict[str, list[tuple[str, int]]]:
    """The collectives of one step and of one update, with a mesh, a given group of all ranks, both or neither."""
    if layout == "plain":
        optimizer = torch.optim.SGD([own(4, gradient=4.0)], lr=1.0)
    else:
        grid = {"line": meshes.mesh(2, names=("dp",)), "grid": None}[layout] or meshes.mesh(2, 2)
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), grid, [Shard(0)] * grid.ndim))
        parameter.grad = distribute_tensor(torch.ones(4, 4), grid, [Shard(0)] * grid.ndim)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(process_group=dist.group.WORLD if given else None)
    with collectives() as step:
        scaler.step(optimizer)
    with collectives() as update:
        scaler.update()
    return {"step": step, "update": update}


def never_gathers() -> dict[str, int]:
    """How often a step, a clip and an update assemble a whole DTensor."""
    called = {"full_tensor": 0, "redistribute": 0}
    originals = {name: getattr(DTensor, name) for name in called}

    def watched(name: str) -> Callable[..., Any]:
        def call(tensor: DTensor, *arguments: Any, **options: Any) -> Any:
            called[name] += 1
            return originals[name](tensor, *arguments, **options)

        return call

    layout = meshes.fsdp2("sgd")
    scaler = GradScaler()
    layout.backward(0, scaler)
    for name in called:
        setattr(DTensor, name, watched(name))
    try:
        scaler.clip_grad_norm_(layout.optimizer, 1.0)
        scaler.step(layout.optimizer)
        scaler.update()
    finally:
        for name, original in originals.items():
            setattr(DTensor, name, original)
    return called


def load(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Each rank loads its own state; what was raised and the scale that is left."""
    scaler = GradScaler(init_scale=8.0, process_group=dist.group.WORLD)
    return {"raised": caught(lambda: scaler.load_state_dict(states[dist.get_rank()])), "scale": scaler.get_scale()}


def different_scales(in_update: bool) -> tuple[str, str]:
    """The ranks start from different scales."""
    optimizer = torch.optim.SGD([own(2, gradient=4.0)], lr=1.0)
    scaler = GradScaler(init_scale=2.0 ** (3 + dist.get_rank()), process_group=dist.group.WORLD)
    return caught(scaler.update if in_update else lambda: scaler.step(optimizer))


def update_wrongly() -> tuple[tuple[str, str], float]:
    """The last rank gives update a scale that is none; then both update as they should."""
    scaler = GradScaler(init_scale=4.0, process_group=dist.group.WORLD)
    raised = caught(lambda: scaler.update(torch.nan if dist.get_rank() else None))
    scaler.update()
    return raised, scaler.get_scale()


def load_alone(enabled: bool) -> tuple[tuple[str, str], bool]:
    """Rank 0 loads a state while the other rank steps, or loads nothing with a scaler that is disabled."""
    parameter = own(2, gradient=8.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=4.0, enabled=enabled, process_group=dist.group.WORLD)
    state = GradScaler(8.0).state_dict()
    if dist.get_rank() == 0:
        raised = caught(lambda: scaler.load_state_dict(state))
    else:
        raised = caught(lambda: scaler.step(optimizer) if enabled else scaler.load_state_dict({}))
    untouched = scaler.state_dict()["scale"] == 4.0 and bool((parameter.grad == 8).all())
    return raised, untouched


def no_optimizer() -> list[tuple[str, str]]:
    """What has no parameters is stepped, unscaled and clipped on the last rank."""
    parameter = own(2, gradient=8.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=4.0, process_group=dist.group.WORLD)
    it: Any = object() if dist.get_rank() else optimizer
    calls = (scaler.step, scaler.unscale_, lambda it: scaler.clip_grad_norm_(it, 1.0))
    return [caught(functools.partial(call, it)) for call in calls]


def destroyed() -> list[tuple[str, str]]:
    """The scaler's group is destroyed while others live."""
    group = dist.new_group()
    optimizer = torch.optim.SGD([own(2, gradient=8.0)], lr=1.0)
    scaler = GradScaler(init_scale=4.0, process_group=group)
    dist.destroy_process_group(group)
    return [caught(functools.partial(scaler.step, optimizer)), caught(scaler.update)]


def redone() -> tuple[bool, list[float], float]:
    """A step raises on both ranks; both do their backward again, which leaves the last rank without a gradient."""
    first, second = own(2, gradient=8.0), own(2, gradient=8.0)
    one, other = (torch.optim.SGD([parameter], lr=1.0) for parameter in (first, second))
    scaler = GradScaler(init_scale=8.0, process_group=dist.group.WORLD)

    def fail(*_: Any) -> None:
        raise OSError("disk")

    handle = one.register_step_pre_hook(fail)
    assert caught(lambda: scaler.step(one))[0] == "OSError"
    handle.remove()
    one.zero_grad()
    if dist.get_rank() == 0:
        first.grad = torch.full((2,), torch.inf)
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    return scaler.step_was_skipped(one), second.tolist(), scaler.get_scale()


def out_of_step() -> tuple[str, str]:
    """The last rank calls ``update`` where the others step."""
    optimizer = torch.optim.SGD([own(2, gradient=4.0)], lr=1.0)
    scaler = GradScaler(process_group=dist.group.WORLD)
    last = dist.get_rank() == dist.get_world_size() - 1
    return caught(scaler.update if last else lambda: scaler.step(optimizer))


def two_optimizers(overflowing: int | None, meshed: bool) -> dict[str, Any]:
    """One optimizer on all ranks, one on the lower half; ``overflowing`` is a rank of the half."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    shared = own(2, gradient=8.0)
    whole = torch.optim.SGD([shared], lr=1.0)
    part = own(2, gradient=torch.inf if rank == overflowing else 8.0)
    if meshed and rank < half:
        part = _on_mesh(part, meshes.lower_half())
    elif meshed:
        meshes.lower_half()
    some = torch.optim.SGD([part], lr=1.0)
    groups: dict[Any, Any] = {whole: dist.group.WORLD}
    half_group = first_half()
    if rank < half and not meshed:
        groups[some] = half_group
    scaler = GradScaler(init_scale=4.0, process_group=groups)
    scaler.step(whole)
    skips = [scaler.step_was_skipped(whole)]
    if rank < half:
        scaler.step(some)
        skips.append(scaler.step_was_skipped(some))
    scaler.update()
    return {"skips": skips, "scale": scaler.get_scale(), "shared": shared.detach().clone()}


def _on_mesh(parameter: nn.Parameter, grid: Any) -> nn.Parameter:
    result = nn.Parameter(DTensor.from_local(parameter.detach(), grid, [Shard(0)]))
    result.grad = DTensor.from_local(parameter.grad, grid, [Shard(0)])
    return result


def orders(kind: str) -> list[list[int]]:
    """The groups of an optimizer whose parameters name the dimensions of a grid in another order on each rank."""
    rank = dist.get_rank()
    grid = meshes.mesh(2, 2) if kind == "regular" else meshes.crooked()
    dimensions = [grid["tp"], grid["dp"]] if rank % 2 else [grid["dp"], grid["tp"]]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()])) for mesh in dimensions]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    consensus = Consensus()
    ranks = consensus.of(optimizer)
    assert ranks is not None
    alone = [ranks.agree(rank == who, 1.0) for who in range(dist.get_world_size())]
    return [[dist.get_process_group_ranks(group) for group in ranks.groups], alone]


def told(how: str) -> dict[str, Any]:
    """Plain tensors, an overflow on the last rank, and the groups given in one of the accepted ways."""
    optimizer = torch.optim.SGD(
        [own(2, gradient=torch.inf if dist.get_rank() == dist.get_world_size() - 1 else 8.0)], lr=1.0
    )
    grid = meshes.mesh(2, 2)
    ways = {
        "group": dist.group.WORLD,
        "mesh": grid,
        "list of meshes": [grid["tp"], grid["dp"]],
        "group and mesh": (grid.get_group("dp"), grid["tp"]),
        "mapping": {optimizer: grid},
        "mapping of another": {object(): grid},
        "lower half": first_half(),
        "none": None,
    }
    scaler = GradScaler(init_scale=4.0, process_group=ways[how])
    scaler.step(optimizer)
    scaler.update()
    return {"skipped": scaler.step_was_skipped(optimizer), "scale": scaler.get_scale()}


def copies_go_alone() -> list[Any]:
    """A pickle and a copy of a scaler that has a group, and the collectives of their updates."""
    scaler = GradScaler(init_scale=32.0, process_group=dist.group.WORLD)
    others = [pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)]
    with collectives() as seen:
        for other in others:
            other.update()
    return [[other.get_scale() for other in others], seen]


def count_clip(layout: str) -> list[tuple[str, int]]:
    """The collectives of one clip and the step after it."""
    spread = getattr(meshes, layout)("sgd")
    scaler = GradScaler()
    spread.backward(0, scaler)
    with collectives() as seen:
        scaler.clip_grad_norm_(spread.optimizer, 1.0)
        scaler.step(spread.optimizer)
    return seen


def count_reads(layout: str, scale: float, clips: bool) -> dict[str, int]:
    """The host reads of a second iteration, with a mesh or a given group of all ranks, and whether it was skipped."""
    if layout == "plain":
        optimizer = torch.optim.SGD([own(4, gradient=3.0), own(2, gradient=4.0, dtype=torch.float64)], lr=1.0)
    else:
        grid = meshes.mesh(2, names=("dp",)) if layout == "line" else meshes.mesh(2, 2)
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), grid, [Shard(0)] * grid.ndim))
        parameter.grad = distribute_tensor(torch.ones(4, 4), grid, [Shard(0)] * grid.ndim)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(scale, process_group={optimizer: dist.group.WORLD} if layout == "plain" else None)
    unscale = (lambda: scaler.clip_grad_norm_(optimizer, 1.0)) if clips else (lambda: scaler.unscale_(optimizer))
    unscale()
    scaler.update()
    with reads.watched() as seen:
        scaler.scale(torch.ones(()))
        before = seen.count
        unscale()
        unscaled = seen.count
        scaler.step(optimizer)
        stepped = seen.count
    return {
        "scale": before,
        "unscale": unscaled - before,
        "step": stepped - unscaled,
        "skips": int(scaler.step_was_skipped(optimizer)),
    }


def repeated(times: int, delay: float) -> list[Any]:
    """The same pattern of overflows again and again, this rank delayed at random before every call."""
    random.seed(dist.get_rank())
    results = []
    for _ in range(times):
        parameter = own(2, gradient=0.0)
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        scaler = GradScaler(init_scale=64.0, growth_interval=2, process_group=dist.group.WORLD)
        skips = []
        for iteration in range(6):
            overflows = iteration in (1 + dist.get_rank(), 4)
            parameter.grad.fill_(torch.inf if overflows else scaler.get_scale())
            for action in (lambda: scaler.step(optimizer), scaler.update):  # noqa: B023 - called at once
                time.sleep(random.random() * delay)
                action()
            skips.append(scaler.step_was_skipped(optimizer))
        results.append((skips, scaler.get_scale(), parameter.detach().tolist()))
    return results


def single_process_costs_nothing() -> list[tuple[str, int]]:
    """A model that nothing shards trains without a collective."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    x, y = batch(0)
    scaler.scale(loss_of(model(x), y)).backward()
    with collectives() as seen:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return seen
