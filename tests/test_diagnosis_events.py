"""What a listener hears of a scaler, and that the run does not notice being listened to.

The same script is told the same story by lucid's scaler and by PyTorch's; expected scales are powers of two on
paper. Knows nothing of what anybody does with the events.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lucid.amp import GradScaler, ScaleUpdate
from lucid.amp.diagnosis import Listener, listen

MAKERS = {"lucid": GradScaler, "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings)}
INF = float("inf")


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What makes lucid's scaler, then PyTorch's."""
    return MAKERS[request.param]


class Notes(Listener):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def scaled(self, scaler: Any, outputs: Any) -> None:
        """Note the loss."""
        self.events.append(("scaled", outputs.item()))

    def overflowed(self, scaler: Any, optimizer: Any, gradients: Any) -> None:
        """Note the gradients' names."""
        self.events.append(("overflowed", [gradient.name for gradient in gradients]))

    def skipped(self, scaler: Any, optimizer: Any, gradients: Any) -> None:
        """Note the gradients by name and value."""
        self.events.append(("skipped", {gradient.name: gradient.tensor.tolist() for gradient in gradients}))

    def ended(self, scaler: Any, index: int) -> None:
        """Note the number."""
        self.events.append(("ended", index))

    def updated(self, scaler: Any, update: ScaleUpdate) -> None:
        """Note the update and the scale that is in force now."""
        self.events.append(("updated", update, scaler.get_scale()))

    def of(self, event: str) -> list[Any]:
        """What was noted of one event."""
        return [facts[0] if len(facts) == 1 else facts for name, *facts in self.events if name == event]


class Line(nn.Module):
    """The sum of a·x + b, whose gradients are x and the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.b = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return (self.a * x + self.b).sum()


def train(scaler: Any, xs: list[list[float]], optimizer: type[Any] = torch.optim.SGD, **settings: Any) -> Line:
    """One step for each x."""
    model = Line()
    stepper = optimizer(model.named_parameters(), lr=0.5, **settings)
    for x in xs:
        stepper.zero_grad()
        scaler.scale(model(torch.tensor(x))).backward()
        scaler.step(stepper)
        scaler.update()
    return model


def test_the_story_of_three_steps(make: Callable[..., Any]) -> None:
    """Scaled, skipped, ended and updated come in this order, with the true gradients of the skip."""
    scaler, notes = make(init_scale=4.0, growth_interval=1), Notes()
    with listen(scaler, notes):
        train(scaler, [[1.0, 2.0], [INF, 3.0]])
    assert notes.events == [
        ("scaled", 5.0),
        ("ended", 0),
        ("updated", ScaleUpdate(0, 4.0, 8.0, False, (False,)), 8.0),
        ("scaled", INF),
        ("skipped", {"a": [INF, 3.0], "b": 2.0}),
        ("ended", 1),
        ("updated", ScaleUpdate(1, 8.0, 4.0, True, (True,)), 4.0),
    ]


def test_both_scalers_tell_the_same() -> None:
    """The events of a longer run are the same, whichever scaler is used."""
    xs = [[1.0, 2.0], [INF, 1.0], [2.0, 1.0], [float("nan"), 1.0], [1.0, 1.0], [3.0, 1.0]]
    stories = []
    for make in MAKERS.values():
        scaler, notes = make(init_scale=64.0, growth_interval=2), Notes()
        with listen(scaler, notes):
            train(scaler, xs)
        stories.append(repr(notes.events))
    assert stories[0] == stories[1]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_the_run_is_bit_for_bit_the_same(make: Callable[..., Any], optimizer: type[Any], fused: bool) -> None:
    """Parameters and scale are exactly those of a run to which nobody listens."""
    xs = [[1.0, 2.0], [INF, 1.0], [2.0, 1.0], [1.0, 0.3]]
    plain, heard = make(init_scale=1024.0, growth_interval=2), make(init_scale=1024.0, growth_interval=2)
    expected = train(plain, xs, optimizer, fused=fused)
    listen(heard, Notes())
    model = train(heard, xs, optimizer, fused=fused)
    assert torch.equal(model.a, expected.a) and torch.equal(model.b, expected.b)
    assert heard.state_dict() == plain.state_dict()


def test_a_fused_skip_is_told_truthfully(make: Callable[..., Any]) -> None:
    """PyTorch calls a fused optimizer on an overflow too; it is a skip all the same."""
    scaler, notes = make(init_scale=4.0), Notes()
    with listen(scaler, notes):
        train(scaler, [[1.0, 2.0], [INF, 3.0], [1.0, 1.0]], torch.optim.Adam, fused=True)
    assert [update.skipped for update, _ in notes.of("updated")] == [(False,), (True,), (False,)]
    assert len(notes.of("skipped")) == 1


def test_gradients_that_were_not_divided_say_so() -> None:
    """PyTorch leaves the gradients of a fused step scaled: the record tells by what."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen: list[Any] = []

    class Ear(Listener):
        def skipped(self, scaler: Any, optimizer: Any, gradients: Any) -> None:
            seen.extend((one.name, one.tensor.tolist(), one.scale.item()) for one in gradients)

    with listen(scaler, Ear()):
        train(scaler, [[INF, 3.0]], torch.optim.Adam, fused=True)
    assert seen == [("a", [INF, 12.0], 4.0), ("b", 8.0, 4.0)]


def test_an_overflow_is_told_before_it_is_clipped(make: Callable[..., Any]) -> None:
    """``unscale_`` tells what overflowed while it can be seen; clipping then spoils every gradient."""
    scaler, notes, model = make(init_scale=4.0), Notes(), Line()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5)
    with listen(scaler, notes):
        scaler.scale(model(torch.tensor([float("nan"), 3.0]))).backward()
        scaler.unscale_(optimizer)
        told = notes.of("overflowed")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
    assert told == [["a", "b"]]
    assert str(notes.of("skipped")) == "[{'a': [nan, nan], 'b': nan}]"


class Divisions(Listener):
    """Notes each optimizer and what its first gradient is when it is about to be divided."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, float]] = []

    def dividing(self, scaler: Any, optimizer: Any) -> None:
        """Note it."""
        self.seen.append((optimizer, optimizer.param_groups[0]["params"][1].grad.item()))


DIVIDED_BY = [(name, by) for name in MAKERS for by in ("step", "unscale_", "fused")] + [("lucid", "clip_grad_norm_")]


@pytest.mark.parametrize(("name", "by"), DIVIDED_BY)
def test_a_division_is_told_once_before_it_is_made(name: str, by: str) -> None:
    """Whichever call divides first, the gradients are still scaled when it is told, and it is told no more."""
    scaler, notes, model = MAKERS[name](init_scale=4.0), Divisions(), Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=by == "fused")
    with listen(scaler, notes):
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([1.0, 2.0]))).backward()
            if by in ("unscale_", "clip_grad_norm_"):
                getattr(scaler, by)(optimizer, *([100.0] if by == "clip_grad_norm_" else []))
            scaler.step(optimizer)
            scaler.update()
    # Two elements, each with a gradient of 1, times the scale.
    assert notes.seen == [(optimizer, 8.0)] * 2


def test_unscaling_inside_step_is_no_event_of_its_own(make: Callable[..., Any]) -> None:
    """Where the script does not call ``unscale_``, nobody hears of it."""
    scaler, notes = make(init_scale=4.0), Notes()
    with listen(scaler, notes):
        train(scaler, [[INF, 3.0]])
    assert notes.of("overflowed") == []


def test_an_unscaled_optimizer_that_is_never_stepped_overflows_the_update(make: Callable[..., Any]) -> None:
    """The update says overflow, and that no step was skipped."""
    scaler, notes, model = make(init_scale=4.0), Notes(), Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with listen(scaler, notes):
        scaler.scale(model(torch.tensor([INF, 3.0]))).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    [(update, _)] = notes.of("updated")
    assert update.overflow and not any(update.skipped)


def test_a_scale_set_by_hand_is_told(make: Callable[..., Any]) -> None:
    """``update(new_scale)`` moves the scale without an overflow, also downwards."""
    scaler, notes, model = make(init_scale=4.0), Notes(), Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with listen(scaler, notes):
        scaler.scale(model(torch.tensor([1.0, 3.0]))).backward()
        scaler.step(optimizer)
        scaler.update(2.0)
    [(update, _)] = notes.of("updated")
    assert (update.scale, update.new_scale, update.overflow) == (4.0, 2.0, False)


def test_names_without_named_parameters(make: Callable[..., Any]) -> None:
    """Group and index name a parameter of an optimizer that knows no names."""
    scaler, notes, model = make(init_scale=4.0), Notes(), Line()
    optimizer = torch.optim.SGD([{"params": [model.a]}, {"params": [model.b]}], lr=0.5)
    with listen(scaler, notes):
        scaler.scale(model(torch.tensor([INF, 3.0]))).backward()
        scaler.step(optimizer)
    assert list(notes.of("skipped")[0]) == ["group 0, parameter 0", "group 1, parameter 0"]


def test_removing_leaves_the_scaler_as_it_was(make: Callable[..., Any]) -> None:
    """After the last listener has gone, in whichever order, nothing is left on the scaler; twice does nothing."""
    scaler = make(init_scale=4.0)
    before = set(vars(scaler))
    first, second, third = (listen(scaler, Notes()) for _ in range(3))
    second.remove()
    first.remove()
    third.remove()
    third.remove()
    assert set(vars(scaler)) == before
    assert scaler.step.__func__ is type(scaler).step


def test_the_others_go_on_hearing(make: Callable[..., Any]) -> None:
    """Removing one listener takes nothing from another."""
    scaler, gone, there = make(init_scale=4.0), Notes(), Notes()
    handle = listen(scaler, gone)
    listen(scaler, there)
    handle.remove()
    train(scaler, [[1.0, 1.0]])
    assert gone.events == [] and len(there.events) == 3


def test_a_listener_may_listen_twice(make: Callable[..., Any]) -> None:
    """The same object given twice hears everything twice, and once after one handle is removed."""
    scaler, notes = make(init_scale=4.0), Notes()
    listen(scaler, notes)
    handle = listen(scaler, notes)
    train(scaler, [[1.0, 1.0]])
    handle.remove()
    train(scaler, [[1.0, 1.0]])
    assert len(notes.of("scaled")) == 3


def test_a_stand_in_that_somebody_put_on_top_stays() -> None:
    """A method that was replaced after us is not taken away with us, and still works."""
    scaler, calls = torch.amp.GradScaler("cpu", init_scale=4.0), []
    handle = listen(scaler, Notes())
    ours = scaler.step

    def theirs(*args: Any) -> Any:
        calls.append("theirs")
        return ours(*args)

    scaler.step = theirs
    handle.remove()
    train(scaler, [[1.0, 1.0]])
    assert calls == ["theirs"] and scaler.step is theirs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_is_not_listened_to(make: Callable[..., Any], copied: Callable[[Any], Any]) -> None:
    """A copied or unpickled scaler works by itself and keeps its scale; the listener does not hear it."""
    scaler, notes = make(init_scale=4.0, growth_interval=1), Notes()
    listen(scaler, notes)
    other = copied(scaler)
    train(other, [[1.0, 1.0]])
    assert notes.events == []
    assert (other.get_scale(), scaler.get_scale()) == (8.0, 4.0)


def test_a_scaler_that_is_listened_to_can_be_saved(make: Callable[..., Any]) -> None:
    """``torch.save`` of the whole object and of its state work while somebody listens."""
    scaler = make(init_scale=4.0)
    listen(scaler, Notes())
    file = io.BytesIO()
    torch.save({"scaler": scaler, "state": scaler.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded["scaler"].get_scale() == loaded["state"]["scale"] == 4.0


def test_what_is_not_heard_is_not_worked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that hears only losses makes no host read beyond PyTorch's own, for a fused optimizer either."""

    class Losses:
        def scaled(self, scaler: Any, outputs: Any) -> None:
            """Hear it, and read nothing."""

    reads = []
    for name in ("item", "__bool__", "tolist"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, real=real: reads.append(1) or real(self))

    def counted(listening: bool) -> int:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if listening:
            listen(scaler, Losses())
        reads.clear()
        train(scaler, [[1.0, 1.0]] * 3, torch.optim.Adam, fused=True)
        return len(reads)

    assert counted(True) == counted(False)


def test_an_iterator_of_losses_is_scaled_and_heard() -> None:
    """PyTorch scales a generator lazily; it still does, and the listener sees the losses."""
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=4.0), []

    class Ear(Listener):
        def scaled(self, scaler: Any, outputs: Any) -> None:
            seen.extend(output.item() for output in outputs)

    def losses() -> Iterator[Tensor]:
        yield torch.tensor(1.0)
        yield torch.tensor(2.0)

    with listen(scaler, Ear()):
        scaled = scaler.scale(losses())
        assert [loss.item() for loss in scaled] == [4.0, 8.0]
    assert seen == [1.0, 2.0]


def test_a_disabled_scaler_is_silent(make: Callable[..., Any]) -> None:
    """Nothing is told of a scaler that does nothing, and the training goes on."""
    scaler, notes = make(enabled=False), Notes()
    with listen(scaler, notes):
        model = train(scaler, [[1.0, 2.0]])
    assert notes.events == []
    assert model.a.tolist() == [0.5, 1.0]


def test_an_optimizer_that_is_no_torch_optimizer() -> None:
    """A duck-typed optimizer is judged by its gradients, since it has no hooks."""

    class Duck:
        def __init__(self, parameters: list[Any]) -> None:
            self.param_groups = [{"params": parameters}]

        def step(self) -> None:
            """Move nothing."""

    scaler, notes, model = torch.amp.GradScaler("cpu", init_scale=4.0), Notes(), Line()
    duck = Duck(list(model.parameters()))
    with listen(scaler, notes):
        for x in ([1.0, 1.0], [INF, 1.0]):
            model.zero_grad()
            scaler.scale(model(torch.tensor(x))).backward()
            scaler.step(duck)
            scaler.update()
    assert [update.skipped for update, _ in notes.of("updated")] == [(False,), (True,)]


def test_two_optimizers_are_told_apart(make: Callable[..., Any]) -> None:
    """Only the optimizer that overflowed is skipped; the update lists both in the order of their steps."""
    scaler, notes, first, second = make(init_scale=4.0), Notes(), Line(), Line()
    optimizers = [torch.optim.SGD(model.named_parameters(), lr=0.5) for model in (first, second)]
    with listen(scaler, notes):
        scaler.scale(first(torch.tensor([1.0, 1.0])) + second(torch.tensor([INF, 1.0]))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert notes.of("updated")[0][0].skipped == (False, True)
    assert notes.of("skipped") == [{"a": [INF, 1.0], "b": 2.0}]


def test_sparse_gradients_are_told_by_their_values(make: Callable[..., Any]) -> None:
    """The values of an embedding's sparse gradient are what a listener gets, coalesced."""
    scaler, notes = make(init_scale=4.0), Notes()
    table = nn.Embedding(4, 1, sparse=True)
    optimizer = torch.optim.SGD(table.named_parameters(), lr=0.5)
    with listen(scaler, notes):
        scaler.scale((table(torch.tensor([1, 1, 2])) * torch.tensor([[1.0], [2.0], [INF]])).sum()).backward()
        scaler.step(optimizer)
    assert notes.of("skipped") == [{"weight": [[3.0], [INF]]}]


@pytest.mark.filterwarnings("ignore")  # PyTorch's tracer warns of itself
def test_a_compiled_training_step_is_heard_and_does_the_same() -> None:
    """PyTorch's scaler is called between compiled graphs, so that all is heard; the parameters are the same."""

    def trained(listener: Listener | None) -> Line:
        scaler, model = torch.amp.GradScaler("cpu", init_scale=4.0), Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if listener is not None:
            listen(scaler, listener)

        @torch.compile(backend="eager")
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()

        for x in ([1.0, 2.0], [INF, 1.0]):
            step(torch.tensor(x))
        return model

    notes = Notes()
    assert torch.equal(trained(notes).a, trained(None).a)
    assert [update.skipped for update, _ in notes.of("updated")] == [(False,), (True,)]
    assert len(notes.of("scaled")) == 2


def test_what_is_no_scaler_is_refused() -> None:
    """The message says what was given and what is taken."""
    with pytest.raises(TypeError, match=r"given a Line; it takes lucid.amp.GradScaler or torch.amp.GradScaler"):
        listen(Line(), Notes())


def test_who_hears_nothing_is_refused(make: Callable[..., Any]) -> None:
    """An object without any of the methods is told their names."""
    with pytest.raises(TypeError, match="hears nothing: give it one of the methods scaled, dividing, overflowed"):
        listen(make(), Listener())


def test_what_a_listener_raises_reaches_the_script(make: Callable[..., Any]) -> None:
    """As a hook's exception does; the update itself has happened."""
    scaler = make(init_scale=4.0, growth_interval=1)

    class Angry(Listener):
        def updated(self, scaler: Any, update: ScaleUpdate) -> None:
            raise KeyError("angry")

    listen(scaler, Angry())
    with pytest.raises(KeyError):
        train(scaler, [[1.0, 1.0]])
    assert scaler.get_scale() == 8.0


def test_the_deprecated_name_and_fsdp_s_scaler_are_pytorch_s() -> None:
    """``torch.cuda.amp.GradScaler``, ``torch.GradScaler`` and FSDP's are taken for what they derive from."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    with pytest.warns(FutureWarning, match="deprecated"):
        old = torch.cuda.amp.GradScaler(enabled=False)
    for scaler in (old, torch.GradScaler("cpu"), ShardedGradScaler("cpu", process_group=None)):
        with listen(scaler, Notes()) as handle:
            assert "step" in vars(scaler)
        handle.remove()
        assert "step" not in vars(scaler)
