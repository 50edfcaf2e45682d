"""A watch over a model: what it keeps, when it looks again, and that the run does not notice.

Expected modules and kinds are known from how each small model is made. Both scalers are watched alike.
"""

import copy
import gc
import io
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lucid.amp import GradScaler, _torch
from lucid.amp.diagnosis import Explanation, Watch, explain, watch

MAKERS = {"lucid": GradScaler, "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings)}
INF, NAN = math.inf, math.nan


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What makes lucid's scaler, then PyTorch's."""
    return MAKERS[request.param]


class Overflows(torch.autograd.Function):
    """The identity, whose backward is inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return inf."""
        return gradient * INF


class Net(nn.Module):
    """Two layers with dropout and batch normalisation; the backward can be made to overflow between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor, overflow: bool = False) -> Tensor:
        """Return the output."""
        x = self.drop(self.norm(self.first(x)))
        return self.last(Overflows.apply(x) if overflow else x)


def net() -> Net:
    """A net that is always the same."""
    torch.manual_seed(0)
    return Net()


def batch(seed: int = 0) -> Tensor:
    """A batch that is always the same."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, scaler: Any, optimizer: Any, x: Tensor, factor: float = 1.0, **kwargs: Any) -> None:
    """One iteration; the loss is the mean of the output times a factor."""
    optimizer.zero_grad()
    scaler.scale(model(x, **kwargs).mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that knows no names."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def silent(model: nn.Module, scaler: Any, **settings: Any) -> Watch:
    """A watch that reports nothing by itself."""
    return watch(model, scaler, report=None, **settings)


def script(scaler: Any, watching: bool) -> tuple[dict[str, Tensor], Tensor, Any]:
    """A run with dropout, normalisation, good steps, skips of each kind; its end state, and the next random number."""
    model = net()
    optimizer = sgd(model)
    if watching:
        silent(model, scaler, outputs=2)
    torch.manual_seed(1)
    for number in range(8):
        x = batch(number)
        if number in (2, 5):
            x[0, 0] = NAN
        step(model, scaler, optimizer, x, overflow=number == 3)
    return model.state_dict(), torch.rand(1), scaler.state_dict()


def test_the_run_is_bit_for_bit_the_same(make: Callable[..., Any]) -> None:
    """Weights, running statistics, random numbers and scale are those of a run that nobody watches."""
    plain, watched = (script(make(init_scale=1024.0, growth_interval=3), watching) for watching in (False, True))
    assert all(torch.equal(plain[0][name].nan_to_num(), watched[0][name].nan_to_num()) for name in plain[0])
    assert torch.equal(plain[1], watched[1]) and plain[2] == watched[2]


def test_a_step_that_lands_costs_no_host_read(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a watch, good steps read as often as without."""
    reads: list[int] = []
    for name in ("item", "__bool__", "__float__", "tolist", "numpy"):
        real = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *args, real=real: reads.append(1) or real(self, *args))

    def counted(watching: bool) -> int:
        model, scaler = net(), make(init_scale=4.0)
        optimizer = sgd(model)
        if watching:
            silent(model, scaler)
        step(model, scaler, optimizer, batch())
        reads.clear()
        for _ in range(6):
            step(model, scaler, optimizer, batch())
        return len(reads)

    assert counted(True) == counted(False)


def test_no_hook_but_on_the_outermost_module(make: Callable[..., Any]) -> None:
    """Two hooks on the model, none on any other module; none at all after the watch."""
    model = net()
    handle = silent(model, make())
    hooks = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
    }
    handle.remove()
    assert hooks == {"": 2, "first": 0, "norm": 0, "drop": 0, "last": 0}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_end_of_a_block_ends_the_watch(make: Callable[..., Any]) -> None:
    """What was seen inside the block stays known behind it; what comes after is not seen."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    x = batch()
    x[0, 0] = NAN
    with watch(model, scaler, report=None) as handle:
        assert isinstance(handle, Watch)
        step(model, scaler, optimizer, x)
    step(model, scaler, optimizer, batch(), overflow=True)
    explanation = explain(scaler)
    assert (explanation.kind, explanation.reason, explanation.update) == (
        "loss not finite",
        "the batch itself is not finite",
        0,
    )


def test_names_come_from_the_model(make: Callable[..., Any]) -> None:
    """An optimizer without names has them told by the watched model."""
    model, scaler = net(), make(init_scale=4.0)
    silent(model, scaler)
    step(model, scaler, sgd(model), batch(), overflow=True)
    [cause] = explain(scaler).causes
    assert [gradient.name for gradient in cause.gradients] == ["first.weight", "first.bias", "norm.weight", "norm.bias"]


def test_a_backward_overflow_is_traced_to_a_module(make: Callable[..., Any]) -> None:
    """The last module in forward order whose gradients are not finite, here the one before the overflow."""
    model, scaler = net(), make(init_scale=4.0)
    silent(model, scaler)
    step(model, scaler, sgd(model), batch(), overflow=True)
    explanation = explain(scaler)
    assert (explanation.kind, explanation.where) == ("backward overflowed", ("norm",))


def test_clipping_does_not_hide_where_it_began(make: Callable[..., Any]) -> None:
    """Where ``unscale_`` and clipping turn every gradient into NaN, the module is still the right one."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler)
    scaler.scale(model(batch(), overflow=True).mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(parameter.grad.isnan().any() for parameter in model.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert explain(scaler).where == ("norm",)


def test_forward_order_is_the_order_of_execution(make: Callable[..., Any]) -> None:
    """Modules that are registered the other way round are ordered as they run."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(2, 1), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Overflows.apply(self.second(self.first(x)))

    model, scaler = Backwards(), make(init_scale=4.0)
    silent(model, scaler)
    step(model, scaler, sgd(model), torch.ones(1, 2))
    assert explain(scaler).where == ("second",)


@pytest.mark.parametrize(("bad", "place"), [(0, 1), (1, 2), (2, 3)])
def test_an_accumulated_backward_is_named(make: Callable[..., Any], bad: int, place: int) -> None:
    """Which of three accumulated backward passes overflowed is told; the last one is a plain overflow."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler)
    for number in range(3):
        scaler.scale(model(batch(number), overflow=number == bad).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    explanation = explain(scaler)
    assert explanation.kind == ("backward overflowed" if bad == 2 else "earlier backward overflowed")
    assert f"backward {place} of 3" in str(explanation)


@pytest.mark.parametrize("keep", [1, 3])
def test_an_accumulated_loss_is_named_and_replayed_if_kept(make: Callable[..., Any], keep: int) -> None:
    """A loss that was not finite two passes ago is named; its forward is replayed where the inputs were kept."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler, keep=keep)
    for number in range(3):
        x = batch(number)
        if number == 0:
            x[0, 0] = NAN
        scaler.scale(model(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    explanation = explain(scaler)
    assert explanation.kind == "loss not finite" and "of backward 1 of 3" in str(explanation)
    assert explanation.reason == ("the batch itself is not finite" if keep == 3 else None)
    assert ("no longer kept" in str(explanation)) is (keep == 1)


def test_gradients_left_over_are_told_from_a_new_overflow(make: Callable[..., Any]) -> None:
    """What was not finite before the backward is left over, from the update that is named, until it is cleared."""
    model, scaler = net(), make(init_scale=1024.0)
    optimizer = sgd(model)
    silent(model, scaler)
    kinds = []
    for overflow, clear in ((True, True), (False, False), (False, False), (True, True)):
        if clear:
            optimizer.zero_grad()
        scaler.scale(model(batch(), overflow=overflow).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        kinds.append(explain(scaler).kind)
        if len(kinds) == 3:
            assert "left over from update 0" in str(explain(scaler))
    assert kinds == ["backward overflowed", "gradients never cleared", "gradients never cleared", "backward overflowed"]


def test_gradients_that_are_set_to_zero_are_cleared(make: Callable[..., Any]) -> None:
    """``zero_grad(set_to_none=False)`` after a skip leaves nothing over."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(model(batch(), overflow=True).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert explain(scaler).kind == "backward overflowed"


def test_two_optimizers_on_one_scaler(make: Callable[..., Any]) -> None:
    """Each skipped optimizer has a cause of its own, from its own passes and its own model."""
    first, second, scaler = net(), net(), make(init_scale=4.0)
    optimizers = sgd(first), torch.optim.Adam(second.parameters())
    silent(first, scaler)
    silent(second, scaler)
    x = batch()
    x[0, 0] = NAN
    scaler.scale(first(x).mean()).backward()
    scaler.step(optimizers[0])
    scaler.scale(second(batch(), overflow=True).mean()).backward()
    scaler.step(optimizers[1])
    scaler.update()
    causes = {cause.optimizer: (cause.kind, cause.where) for cause in explain(scaler).causes}
    assert causes == {"SGD": ("loss not finite", ("first",)), "Adam": ("backward overflowed", ("norm",))}


def test_two_losses_of_one_model(make: Callable[..., Any]) -> None:
    """A list of losses, one of which is not finite, is a loss that is not finite."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler)
    output = model(batch()).mean()
    for loss in scaler.scale([output, output * NAN]):
        loss.backward(retain_graph=True)
    scaler.step(optimizer)
    scaler.update()
    assert (explain(scaler).kind, explain(scaler).where) == ("loss not finite", ("the loss function",))


def test_several_forwards_of_one_loss(make: Callable[..., Any]) -> None:
    """Where a loss comes from two forwards, the one that was not finite is found."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler)
    x = batch()
    x[0, 0] = NAN
    scaler.scale(model(x).mean() + model(batch(1)).mean()).backward()
    scaler.step(optimizer)
    assert explain(scaler).reason == "the batch itself is not finite"


def test_a_forward_without_gradients_is_not_kept(make: Callable[..., Any]) -> None:
    """Validation between forward and step does not take the batch's place."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler)
    x = batch()
    x[0, 0] = NAN
    loss = scaler.scale(model(x).mean())
    with torch.no_grad():
        model(batch(1))
    loss.backward()
    scaler.step(optimizer)
    assert explain(scaler).reason == "the batch itself is not finite"


def test_a_replay_that_does_not_reproduce_says_so(make: Callable[..., Any]) -> None:
    """A model that computes something else the second time is not blamed on the loss function."""

    class Once(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            Once.calls += 1
            return self.linear(x) * (NAN if Once.calls == 1 else 1.0)

    model, scaler = Once(), make(init_scale=4.0)
    silent(model, scaler)
    step(model, scaler, sgd(model), batch())
    explanation = explain(scaler)
    assert (explanation.kind, explanation.reason, explanation.where) == ("loss not finite", None, ())
    assert "did not reproduce" in str(explanation)


def test_a_batch_that_was_changed_since_says_so(make: Callable[..., Any]) -> None:
    """A batch that the script overwrites before the step is not taken for the one that went in."""
    model, scaler, x = net(), make(init_scale=4.0), batch()
    optimizer = sgd(model)
    silent(model, scaler)
    scaler.scale(model(x).mean() * NAN).backward()
    x.zero_()
    scaler.step(optimizer)
    text = str(explain(scaler))
    assert "did not reproduce" in text
    assert ("changed in place" in text) is (_torch.version(x) is not None)  # a private name of PyTorch's tells it


def test_a_replay_that_raises_is_told_and_the_training_goes_on(make: Callable[..., Any]) -> None:
    """An exception in the second forward becomes a sentence."""

    class Second(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            Second.calls += 1
            if Second.calls == 2:
                raise RuntimeError("no memory left")
            return self.linear(x)

    model, scaler = Second(), make(init_scale=4.0)
    silent(model, scaler)
    step(model, scaler, sgd(model), batch(), factor=NAN)
    assert "The replay of the forward failed: RuntimeError: no memory left." in str(explain(scaler))


def test_without_replay_there_is_a_kind_and_no_module(make: Callable[..., Any]) -> None:
    """``replay=False`` runs no forward a second time."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler, replay=False)
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    step(model, scaler, optimizer, batch(), factor=NAN)
    step(model, scaler, optimizer, batch(), overflow=True)
    assert len(calls) == 2
    assert explain(scaler).where == ("norm",)  # by the order of registration


def test_a_long_row_of_skips_is_not_replayed_each_time(make: Callable[..., Any]) -> None:
    """The 1st, 2nd, 4th, 8th … skip in a row is looked into; between them the explanation says so."""
    model, scaler = net(), make(init_scale=2.0**20)
    optimizer = sgd(model)
    silent(model, scaler)
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    for _ in range(7):
        step(model, scaler, optimizer, batch(), factor=NAN)
    assert len(calls) == 7 + 3
    assert "7 updates in a row were skipped for this" in str(explain(scaler))
    assert explain(scaler).where == ("the loss function",)


def test_a_backward_that_overflows_for_diverged_weights_says_so(make: Callable[..., Any]) -> None:
    """Where weights have grown a hundredfold since the watch began, the scale's fall is no help and not called so."""
    model, scaler = net(), make(init_scale=1024.0)
    optimizer = sgd(model)
    silent(model, scaler)
    model.first.weight.data *= 1000
    step(model, scaler, optimizer, batch(), overflow=True)
    explanation = explain(scaler)
    assert (explanation.kind, explanation.reason) == ("backward overflowed", "the weights have grown beyond use")
    assert '"first.weight" has grown from' in str(explanation) and "helps by itself" not in str(explanation)


def test_a_landed_step_ends_the_row(make: Callable[..., Any]) -> None:
    """After a step that landed, the next skip is looked into again."""
    model, scaler = net(), make(init_scale=2.0**20)
    optimizer = sgd(model)
    silent(model, scaler)
    for factor in (NAN, NAN, 1.0, NAN):
        step(model, scaler, optimizer, batch(), factor=factor)
    assert "in a row" not in str(explain(scaler))


@pytest.mark.parametrize("bad", [True, False])
def test_the_offending_batch_is_saved(make: Callable[..., Any], tmp_path: Path, bad: bool) -> None:
    """The first batch whose loss was not finite is kept whole, and can be run again; a backward overflow is none."""
    model, scaler, path = net(), make(init_scale=4.0), tmp_path / "batch.pt"
    optimizer = sgd(model)
    silent(model, scaler, save_batch=path)
    step(model, scaler, optimizer, batch(1))
    step(model, scaler, optimizer, batch(2), factor=NAN if bad else 1.0, overflow=not bad)
    if bad:
        step(model, scaler, optimizer, batch(3), factor=NAN)
    assert path.exists() is bad
    if bad:
        saved = torch.load(path, weights_only=False)
        assert torch.equal(saved["args"][0], batch(2)) and saved["kwargs"] == {"overflow": False}
        assert (saved["update"], saved["scale"]) == (1, 4.0)
        torch.set_rng_state(saved["random_state"]["torch.set_rng_state"])


def test_a_batch_that_cannot_be_saved_is_told(make: Callable[..., Any], tmp_path: Path) -> None:
    """A folder that does not exist ends no training."""
    model, scaler = net(), make(init_scale=4.0)
    silent(model, scaler, save_batch=tmp_path / "nowhere" / "batch.pt")
    step(model, scaler, sgd(model), batch(), factor=NAN)
    assert "could not be saved" in str(explain(scaler))


def test_reports_come_by_themselves(make: Callable[..., Any]) -> None:
    """The given function gets an explanation after each update with a skip, once for all watches that share it."""
    model, other, scaler, told = net(), net(), make(init_scale=4.0), []
    optimizers = sgd(model), sgd(other)
    watch(model, scaler, report=told.append)
    watch(other, scaler, report=told.append)
    for factor in (1.0, NAN):
        for each in (model, other):
            each.zero_grad()
        scaler.scale((model(batch()).mean() + other(batch()).mean()) * factor).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    [explanation] = told
    assert isinstance(explanation, Explanation) and len(explanation.causes) == 2


def test_by_default_the_log_is_told(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """What no scale can help is a warning, an overflow of the backward only information."""
    model, scaler = net(), make(init_scale=4.0)
    optimizer = sgd(model)
    watch(model, scaler)
    with caplog.at_level(logging.INFO, "lucid.amp.diagnosis"):
        step(model, scaler, optimizer, batch(), overflow=True)
        step(model, scaler, optimizer, batch(), factor=NAN)
    levels = [record.levelname for record in caplog.records if record.name == "lucid.amp.diagnosis"]
    assert levels == ["INFO", "WARNING"]


def test_a_watch_keeps_nothing_alive(make: Callable[..., Any]) -> None:
    """Model, scaler and batch go when the script lets go of them, also where the watch was never removed."""

    def run() -> list[Any]:
        model, scaler, x = net(), make(init_scale=4.0), batch()
        silent(model, scaler)
        step(model, scaler, sgd(model), x, factor=NAN)
        return [weakref.ref(thing) for thing in (model, scaler, x)]

    references = run()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_inputs_do_not_keep_their_graph(make: Callable[..., Any]) -> None:
    """An input that another model made is kept without that model's graph."""
    model, scaler = net(), make(init_scale=4.0)
    silent(model, scaler)
    leaf = torch.randn(8, 4, requires_grad=True)
    end_of_the_graph = weakref.ref(leaf)
    model(leaf * 2)
    del leaf
    gc.collect()
    assert end_of_the_graph() is None


def test_a_wrapped_model_is_looked_into(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel and a compiled module are watched under the inner module's names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else DataParallel wants its module on the GPU
    for wrapper in (nn.DataParallel, lambda model: torch.compile(model, backend="eager")):
        model, scaler = net(), make(init_scale=4.0)
        wrapped = wrapper(model)
        silent(wrapped, scaler)
        x = batch()
        x[0, 0] = NAN
        step(wrapped, scaler, sgd(model), x)
        explanation = explain(scaler)
        assert (explanation.reason, explanation.where) == ("the batch itself is not finite", ("first",))
        assert [gradient.name for gradient in explanation.causes[0].gradients][:1] == ["first.weight"]


@pytest.mark.filterwarnings("ignore")  # PyTorch's tracer warns of itself
def test_a_model_compiled_in_place_says_what_cannot_be_seen(make: Callable[..., Any]) -> None:
    """A forward that runs inside compiled code is not seen: the kind is told, and why no module is."""
    model, scaler = net(), make(init_scale=4.0)
    silent(model, scaler)
    model.compile(backend="eager")
    step(model, scaler, sgd(model), batch(), factor=NAN)
    explanation = explain(scaler)
    assert explanation.kind == "loss not finite"
    assert "inside torch.compile" in str(explanation)


def test_lucid_s_scale_in_a_compiled_graph_stays_one_graph() -> None:
    """A watch breaks no graph; a loss that was scaled in it is not seen, and the kind is not guessed."""
    model, scaler = nn.Linear(4, 1), GradScaler(init_scale=4.0)
    silent(model, scaler)
    scaler.scale(torch.ones(()))
    scaler.update()
    compiled = torch.compile(lambda x: scaler.scale((x * model.weight).mean() * NAN), fullgraph=True, backend="eager")
    compiled(batch()).backward()
    scaler.step(sgd(model))
    scaler.update()
    assert explain(scaler).kind == "not known"
    assert "it ran inside compiled code" in str(explain(scaler))


def test_updates_are_numbered_as_the_scaler_numbers_them(make: Callable[..., Any]) -> None:
    """A watch that begins later tells the number of lucid's update; of PyTorch's it counts those it heard."""
    model, scaler = net(), make(init_scale=1024.0)
    optimizer = sgd(model)
    for _ in range(3):
        step(model, scaler, optimizer, batch())
    numbers = []
    for _ in range(2):
        with silent(model, scaler):
            step(model, scaler, optimizer, batch())
            step(model, scaler, optimizer, batch(), factor=NAN)
        numbers.append((explain(scaler).update, len(explain(scaler).causes)))
    assert numbers == ([(4, 1), (6, 1)] if isinstance(scaler, GradScaler) else [(1, 1), (3, 1)])


@pytest.mark.filterwarnings("ignore")  # PyTorch's tracer warns of itself
def test_a_watched_model_still_compiles_as_one_graph() -> None:
    """The hooks of a watch break no graph of a function that calls the model."""
    model = nn.Linear(4, 1)
    silent(model, GradScaler())
    compiled = torch.compile(lambda x: model(x).sum(), fullgraph=True, backend="eager")
    assert compiled(batch()).item() == pytest.approx(model(batch()).sum().item())


def test_function_transforms_of_a_watched_model(make: Callable[..., Any]) -> None:
    """``torch.func`` over a watched model gives what it gave; a skip behind it is explained as far as can be."""
    model, scaler = nn.Linear(4, 1), make(init_scale=4.0)
    optimizer = sgd(model)
    silent(model, scaler)
    parameters = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (batch(),)).sum()

    gradients = torch.func.grad(loss)(parameters)
    assert torch.equal(gradients["weight"], batch().sum(0, keepdim=True))
    scaler.scale(loss(parameters) * NAN).backward()
    scaler.step(optimizer)
    assert explain(scaler).kind == "loss not finite"


def test_a_copy_of_a_watched_model_is_not_watched(make: Callable[..., Any]) -> None:
    """An average of the weights, made by a deep copy, trains and saves without the watch."""
    model, scaler = net(), make(init_scale=4.0)
    handle = silent(model, scaler, outputs=1)
    average = copy.deepcopy(model)
    average(batch()).sum().backward()
    assert handle.outputs.measured() == []
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(batch()).sum().backward()
    assert handle.outputs.measured() == []


def test_the_model_may_move_after_the_watch_began(device: torch.device) -> None:
    """A model that is moved to another device later is watched there, with that device's random state."""
    model, scaler = net(), GradScaler(init_scale=4.0)
    silent(model, scaler)
    model.to(device)
    x = batch().to(device)
    x[0, 0] = NAN
    step(model, scaler, sgd(model), x)
    assert explain(scaler).reason == "the batch itself is not finite"
    assert "did not reproduce" not in str(explain(scaler))


def test_without_a_scaler_a_watch_only_measures() -> None:
    """A float32 run can be watched for its ranges; nothing is listened to."""
    model = net()
    with watch(model, outputs=1) as handle:
        model(batch()).mean().backward()
    assert [one.name for one in handle.outputs.measured()] == ["first", "norm", "drop", "last"]


def test_a_measured_backward_asks_for_the_scale_once(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many modules there are: PyTorch's scaler waits for its device at each question."""
    model, scaler, asked = net(), make(init_scale=4.0), []
    with watch(model, scaler, report=None, outputs=2) as handle:
        monkeypatch.setattr(scaler, "get_scale", lambda: asked.append(4.0) or 4.0)
        for _ in range(3):
            model(batch()).mean().backward()
    assert [one.scale for one in handle.outputs.measured()] == [4.0] * 4
    assert len(asked) == 2


def test_a_backward_after_an_update_is_told_at_its_own_scale(make: Callable[..., Any]) -> None:
    """One measured forward, two backward passes, and the scale moves between them."""
    model, scaler = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}), make(init_scale=1024.0)
    model.forward = lambda x: (model["a"](x).sum(), model["b"](x).sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, scaler, report=None, outputs=1) as handle:
        first, second = model(torch.ones(1, 2))
        scaler.scale(first).backward()
        scaler.step(optimizer)
        scaler.update(2048.0)
        scaler.scale(second).backward()
    scales = {one.name: one.scale for one in handle.outputs.measured()}
    assert (scales["a"], scales["b"]) == (1024.0, 2048.0)


@pytest.mark.parametrize("settings", [{"keep": 0}, {"outputs": -1}])
def test_bad_settings_are_refused(settings: dict[str, int]) -> None:
    """The message names what was given."""
    with pytest.raises(ValueError, match=f"{next(iter(settings))}={next(iter(settings.values()))}"):
        watch(net(), GradScaler(), **settings)


def test_what_is_no_module_or_no_scaler_is_refused() -> None:
    """Arguments in the wrong order are told apart, and nothing was hooked."""
    model = net()
    with pytest.raises(TypeError, match=r"takes a module first, got GradScaler: watch\(model, scaler\)"):
        watch(GradScaler(), model)
    with pytest.raises(TypeError, match="given a Net"):
        watch(model, net())
    assert not model._forward_hooks
