"""Slips that cost a whole training and skip no step: what a run tells of them, and when it keeps silent."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lucid.amp import GradScaler
from lucid.amp.cli.report._content import Finding
from lucid.amp.cli.report._findings import findings
from lucid.amp.cli.report._run import read
from lucid.amp.cli.run._folder import Folder
from lucid.amp.cli.run._log import Options
from lucid.amp.cli.run._observer import Observer
from lucid.amp.cli.run._script import Script

MAKERS: dict[str, Callable[..., Any]] = {
    "lucid": GradScaler,
    "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings),
}
STEPS = 6
CLIPPED = "Gradients were clipped while they were still scaled"
BYPASSED = "An optimizer stepped past the scaler"
UNSCALED = "Gradients were divided by the scale, and no loss was multiplied by it"


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What makes lucid's scaler, then PyTorch's."""
    return MAKERS[request.param]


def told(path: Path, script: Callable[[], object]) -> tuple[Finding, ...]:
    """What the report says of a script that was run as ``lucid-amp run`` runs it."""
    path.mkdir(exist_ok=True)
    observer = Observer(Script("train.py", (), is_module=False), Folder(path), Options(every=4))
    with observer:
        script()
    observer.end("exit 0")
    assert observer.notes == []
    return findings(read(path))


def slips(path: Path, script: Callable[[], object]) -> list[str]:
    """The titles of what is told beyond the skips."""
    return [each.title for each in told(path, script) if each.title.startswith((CLIPPED, UNSCALED, BYPASSED))]


class Training:
    """A weight of one element whose true gradient is 2 at every step, its optimizer and scaler."""

    def __init__(self, scaler: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> None:
        self.scaler, self.weight = scaler, nn.Parameter(torch.zeros(1))
        self.optimizer = optimizer([self.weight], lr=0.1, **settings)

    def backward(self) -> None:
        """A backward of the scaled loss, into a fresh gradient."""
        self.optimizer.zero_grad()
        self.scaler.scale((2 * self.weight).sum()).backward()

    def step(self) -> None:
        """Step and update."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, between: Callable[["Training"], object] = lambda self: None, steps: int = STEPS) -> None:
        """Some iterations, with something between backward and step."""
        for _ in range(steps):
            self.backward()
            between(self)
            self.step()


WRONG: dict[str, tuple[Callable[[Training], object], str]] = {
    "norm": (lambda it: clip_grad_norm_(it.optimizer.param_groups[0]["params"], 1.0), "clip_grad_norm_(max_norm=1)"),
    "generator": (lambda it: clip_grad_norm_((one for one in [it.weight]), 1), "clip_grad_norm_(max_norm=1)"),
    "value": (lambda it: clip_grad_value_([it.weight], 0.5), "clip_grad_value_(clip_value=0.5)"),
    "norm that is given": (
        lambda it: clip_grads_with_norm_([it.weight], 0.1, get_total_norm([it.weight.grad])),
        "clip_grads_with_norm_(max_norm=0.1)",
    ),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_clipping_before_unscaling_asks_for_action(name: str, fused: bool, make: Any, tmp_path: Path) -> None:
    """What was called and how often, what its bound was on the true gradients, and what to call first."""
    between, called = WRONG[name]
    first = told(tmp_path, lambda: Training(make(init_scale=1024.0), fused=fused).run(between))[0]
    assert (first.weight, first.title) == ("act", f"{CLIPPED}: {called}")
    bound = float(called.rpartition("=")[2].rstrip(")"))
    assert first.facts[0].startswith(f"At {STEPS} of {STEPS} updates `{called.partition('(')[0]}` clipped gradients")
    assert "the scale, 1,024 at last" in first.facts[0]
    assert f"its bound of {bound:g} was one of {bound / 1024:.2g} on " in first.facts[0]
    assert "`scaler.unscale_(optimizer)` between `backward()` and the clipping" in first.advice
    assert "`scaler.clip_grad_norm_(optimizer, max_norm)`" in first.advice


def test_the_norm_of_a_script_whose_scaler_is_gone_is_told(make: Any, tmp_path: Path) -> None:
    """A scaler that lived in a function, and no sample after the first update: it is told all the same."""

    def main() -> None:
        Training(make(init_scale=1024.0)).run(WRONG["norm"][0], steps=3)

    assert slips(tmp_path, main) == [f"{CLIPPED}: clip_grad_norm_(max_norm=1)"]


def test_clipping_by_an_adding_up_loop_is_told(make: Any, tmp_path: Path) -> None:
    """Clipped after the first of two backward passes: what is divided was clipped, in part."""

    def script() -> None:
        it = Training(make(init_scale=1024.0))
        for _ in range(STEPS):
            it.backward()
            clip_grad_norm_([it.weight], 1.0)
            it.scaler.scale((2 * it.weight).sum()).backward()
            it.step()

    assert slips(tmp_path, script) == [f"{CLIPPED}: clip_grad_norm_(max_norm=1)"]


def test_one_of_two_optimizers_is_told(make: Any, tmp_path: Path) -> None:
    """Unscaled was the one, clipped were both."""

    def script() -> None:
        scaler = make(init_scale=1024.0)
        one, other = Training(scaler), Training(scaler)
        for _ in range(STEPS):
            one.backward()
            other.backward()
            scaler.unscale_(one.optimizer)
            clip_grad_norm_([one.weight, other.weight], 1.0)
            scaler.step(one.optimizer)
            other.step()

    assert slips(tmp_path, script) == [f"{CLIPPED}: clip_grad_norm_(max_norm=1)"]


def after_unscaling(it: Training) -> None:
    """As PyTorch's manual has it."""
    it.scaler.unscale_(it.optimizer)
    clip_grad_norm_([it.weight], 1.0)


def cleared(it: Training) -> None:
    """What was clipped is thrown away."""
    clip_grad_norm_([it.weight], 1.0)
    it.backward()


def of_another_model(it: Training) -> None:
    """A model that nobody scales is trained beside it."""
    beside = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([beside], lr=0.1)
    (5 * beside).sum().backward()
    clip_grad_norm_([beside], 1.0)
    optimizer.step()


def twice_unscaled(it: Training) -> None:
    """A wrapper's optimizer holds the same parameter; lucid divides once."""
    it.scaler.unscale_(it.optimizer)
    clip_grad_norm_([it.weight], 1.0)
    other = torch.optim.SGD([it.weight], lr=0.0)
    if isinstance(it.scaler, GradScaler):
        it.scaler.step(other)


RIGHT: dict[str, Callable[[Training], object]] = {
    "after unscale_": after_unscaling,
    "of another model": of_another_model,
    "to measure": lambda it: clip_grad_norm_([it.weight], torch.inf),
    "beyond reach": lambda it: clip_grad_norm_([it.weight], 1e9),
    "values beyond reach": lambda it: clip_grad_value_([it.weight], 1e9),
    "nothing": lambda it: clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0),
    "cleared": cleared,
    "shared": twice_unscaled,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_in_order_is_no_slip(name: str, make: Any, tmp_path: Path) -> None:
    """Clipped after unscaling, of gradients that no scaler scales, without an effect, or thrown away: silence."""
    assert slips(tmp_path, lambda: Training(make(init_scale=1024.0)).run(RIGHT[name])) == []


def test_zeroed_gradients_are_clipped_anew(make: Any, tmp_path: Path) -> None:
    """Rightly clipped in one iteration, the same tensor is scaled again in the next: not that call's fault."""

    def script() -> None:
        it = Training(make(init_scale=1024.0))
        for _ in range(STEPS):
            it.optimizer.zero_grad(set_to_none=False)
            it.scaler.scale((2 * it.weight).sum()).backward()
            after_unscaling(it)
            it.step()

    assert slips(tmp_path, script) == []


@pytest.mark.parametrize("settings", [{"enabled": False}, {"init_scale": 1.0}], ids=["disabled", "scale 1"])
def test_a_scale_that_changes_nothing_is_no_slip(settings: dict[str, Any], make: Any, tmp_path: Path) -> None:
    """At a scale of 1, and with a scaler that is switched off, gradients have their true values all the time."""
    assert slips(tmp_path, lambda: Training(make(**settings)).run(WRONG["norm"][0])) == []


def test_lucid_s_own_clipping_is_no_slip(tmp_path: Path) -> None:
    """It unscales before it clips."""
    script = lambda: Training(GradScaler(1024.0)).run(lambda it: it.scaler.clip_grad_norm_(it.optimizer, 1.0))  # noqa: E731
    assert slips(tmp_path, script) == []


def test_accelerate_s_own_clipping_is_no_slip(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``clip_grad_norm_`` unscales first; PyTorch's function called by its user does not."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    # Without a GPU it would refuse to be asked for float16.
    monkeypatch.setattr(accelerate.Accelerator, "mixed_precision", "fp16")

    def script(right: bool) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.scaler = make(init_scale=1024.0)
        accelerator.native_amp = True
        weight = nn.Parameter(torch.zeros(1))
        made = torch.optim.SGD([weight], lr=0.1)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(made, scaler=accelerator.scaler)
        accelerator._optimizers.append(optimizer)
        for _ in range(STEPS):
            optimizer.zero_grad()
            accelerator.backward((2 * weight).sum())
            (accelerator.clip_grad_norm_ if right else clip_grad_norm_)([weight], 1.0)
            optimizer.step()

    assert slips(tmp_path / "right", lambda: script(True)) == []
    assert slips(tmp_path / "wrong", lambda: script(False)) == [f"{CLIPPED}: clip_grad_norm_(max_norm=1)"]


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    """A mesh of this one process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("right", [False, True])
def test_spread_parameters_are_told_alike(name: str, right: bool, mesh: Any, tmp_path: Path) -> None:
    """A DTensor's gradient is found by its parameter, and nothing is asked of other ranks."""

    def script() -> None:
        it = Training(GradScaler(1024.0))
        it.weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        it.optimizer = torch.optim.SGD([it.weight], lr=0.1)
        for _ in range(STEPS):
            gradient: Tensor = torch.full((4,), it.scaler.scale(torch.tensor(2.0)).item())
            it.weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            if right:
                it.scaler.unscale_(it.optimizer)
            getattr(nn.utils, name)([it.weight], 1.0)
            it.step()

    assert [title.partition(":")[0] for title in slips(tmp_path / "run", script)] == ([] if right else [CLIPPED])


def without_scale(it: Training) -> None:
    """Every loss as it is, every step through the scaler."""
    for _ in range(STEPS):
        it.optimizer.zero_grad()
        (2 * it.weight).sum().backward()
        it.step()


def test_a_loss_that_is_never_scaled_deserves_a_look(make: Any, tmp_path: Path) -> None:
    """The scaler divides what nobody has multiplied: how often, by how much, and what to write instead."""

    def script() -> None:
        it = Training(make(init_scale=1024.0))
        if isinstance(it.scaler, torch.amp.GradScaler):
            # PyTorch's raises before its first ``scale``.
            it.scaler.scale(torch.ones(()))
            it.scaler.update(1024.0)
        without_scale(it)

    found = told(tmp_path, script)[0]
    assert (found.weight, found.title) == ("look", UNSCALED)
    assert re.match(rf"At {STEPS} of [67] updates gradients were divided by the scale, 1,024 at last", found.facts[0])
    assert "`scaler.scale(loss).backward()`" in found.advice


def test_a_loss_that_may_be_scaled_in_compiled_code_is_no_slip(tmp_path: Path) -> None:
    """Where lucid's ``scale`` was called at all, as it is while a compiled step is traced, nothing is claimed."""

    def script() -> None:
        it = Training(GradScaler(1024.0))
        it.run(steps=1)
        without_scale(it)

    assert slips(tmp_path, script) == []


def past_the_scaler(it: Training, steps: int = STEPS) -> None:
    """Scaled, and stepped as if it were not."""
    for _ in range(steps):
        it.backward()
        it.optimizer.step()
        if isinstance(it.scaler, GradScaler):  # PyTorch's refuses an update without a step
            it.scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_past_the_scaler_asks_for_action(fused: bool, make: Any, tmp_path: Path) -> None:
    """Whose step it was, how often, on what, and what to call instead."""
    found = told(tmp_path, lambda: past_the_scaler(Training(make(init_scale=1024.0), fused=fused)))
    (first,) = [each for each in found if each.title.startswith(BYPASSED)]
    assert (first.weight, first.title) == ("act", f"{BYPASSED}: SGD.step()")
    assert first.facts[0].startswith(f"`SGD.step()` was called {STEPS} times by itself")
    assert "`scaler.step(optimizer)` instead of `optimizer.step()`" in first.advice


def divided_by_hand(it: Training) -> None:
    """The manual way."""
    assert it.weight.grad is not None
    it.weight.grad /= it.scaler.get_scale()


def replaced_by_hand(it: Training) -> None:
    """The manual way, out of place."""
    assert it.weight.grad is not None
    it.weight.grad = it.weight.grad / it.scaler.get_scale()


class Wrapper(torch.optim.SGD):
    """An optimizer whose step is its scaler's step of another one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the other one."""
        self.scaler.step(self.inner)


class DividesItself(torch.optim.SGD):
    """An optimizer that divides by the scale itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Divide and step."""
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= self.scaler.get_scale()
        super().step()


@pytest.mark.parametrize("by_hand", [divided_by_hand, replaced_by_hand, lambda it: it.scaler.unscale_(it.optimizer)])
def test_what_was_divided_by_hand_is_no_slip(by_hand: Any, make: Any, tmp_path: Path) -> None:
    """Gradients that somebody changed since the backward may have their true values."""

    def script() -> None:
        it = Training(make(init_scale=1024.0))
        for _ in range(STEPS):
            it.backward()
            by_hand(it)
            it.optimizer.step()
            it.scaler.update(1024.0)

    assert slips(tmp_path, script) == []


@pytest.mark.parametrize("kind", [Wrapper, DividesItself])
def test_an_optimizer_that_sees_to_it_itself_is_no_slip(kind: Any, make: Any, tmp_path: Path) -> None:
    """A wrapper calls the scaler from its own step; another one divides there."""

    def script() -> None:
        it = Training(make(init_scale=1024.0))
        outer = kind([it.weight], lr=0.1)
        outer.scaler, outer.inner = it.scaler, it.optimizer
        for _ in range(STEPS):
            it.backward()
            outer.step()
            it.scaler.update(1024.0)

    assert slips(tmp_path, script) == []


@pytest.mark.parametrize("reached", [False, True])
def test_a_model_that_is_trained_unscaled_beside_it_is_no_slip(reached: bool, make: Any, tmp_path: Path) -> None:
    """Stepped while another's scaled gradients wait, also where the scaled loss reaches its weight, too."""

    def script() -> None:
        it, critic = Training(make(init_scale=1024.0)), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([critic], lr=0.1)
        for _ in range(STEPS):
            it.optimizer.zero_grad()
            it.scaler.scale((it.weight * (critic if reached else 2)).sum()).backward()
            optimizer.zero_grad()
            (3 * critic).sum().backward()
            optimizer.step()
            it.step()

    assert slips(tmp_path, script) == []
