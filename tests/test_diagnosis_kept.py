"""Which forwards are kept for a replay: those of the update's backward passes, within a bound of memory.

Sizes are known on paper; both scalers are watched alike.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lucid.amp import GradScaler
from lucid.amp.diagnosis import _kept, explain, watch
from lucid.amp.diagnosis._kept import Forward, Kept
from lucid.amp.diagnosis._snapshot import Surroundings

MAKERS = {"lucid": GradScaler, "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings)}
KIB = 2**10


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What makes lucid's scaler, then PyTorch's."""
    return MAKERS[request.param]


class Square(nn.Module):
    """A layer whose square is beyond 65504 for inputs of 300 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the squares."""
        return self.linear(x) ** 2


def net() -> nn.Sequential:
    """A net whose module "1" overflows float16 for large inputs."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    nn.init.eye_(first.weight)
    return nn.Sequential(first, Square(), nn.Linear(4, 1))


class Training:
    """Updates of several backward passes each, with an optimizer for each half of a net or one for all."""

    def __init__(self, scaler: Any, optimizers: int = 1, **settings: Any) -> None:
        self.model, self.scaler = net(), scaler
        halves = (
            [self.model.parameters()] if optimizers == 1 else [self.model[:2].parameters(), self.model[2:].parameters()]
        )
        kinds = (torch.optim.SGD, torch.optim.Adam)
        self.optimizers = [kind(half, lr=1e-6) for kind, half in zip(kinds, halves, strict=False)]
        self.watch = watch(self.model, scaler, report=None, **settings)

    def update(self, *sizes: float) -> None:
        """One update; a backward pass for each number, of inputs that are all that large."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for size in sizes:
            with torch.autocast("cpu", torch.float16):
                output = self.model(torch.full((2, 4), float(size)))
            self.scaler.scale(output.float().mean() / len(sizes)).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("sizes", [(400, 400, 400), (400, 1, 1), (1, 400, 1), (1, 1, 400)])
def test_the_module_is_told_whichever_backward_it_was(
    make: Callable[..., Any], sizes: tuple[float, ...], optimizers: int
) -> None:
    """In the first update already: the module, the reason, and of which backward it is told."""
    training = Training(make(init_scale=4.0), optimizers)
    training.update(*sizes)
    explanation = explain(training.scaler)
    assert len(explanation.causes) == optimizers
    for cause in explanation.causes:
        assert (cause.reason, cause.where) == ("an output beyond float16's 65504", ("1",))
        assert f"backward {sizes.index(400) + 1} of 3" in cause.sentences[0]


@pytest.mark.parametrize("keep", [3, None])
def test_a_batch_of_an_earlier_update_is_not_taken_for_this_one(make: Callable[..., Any], keep: int | None) -> None:
    """However many are kept, it is this update's forward that is run again."""
    training = Training(make(init_scale=4.0), keep=keep)
    training.update(1, 1)
    training.update(400, 1)
    training.update(math.nan)
    assert explain(training.scaler).reason == "the batch itself is not finite"
    assert "did not reproduce" not in str(explain(training.scaler))


def test_what_is_no_longer_kept_names_the_next_move(make: Callable[..., Any], tmp_path: Path) -> None:
    """With ``keep=1`` the first of two backward passes cannot be looked at: how it can, and that no batch was saved."""
    training = Training(make(init_scale=2.0**10), keep=1, save_batch=tmp_path / "batch.pt")
    for _ in range(3):
        training.update(400, 400)
        text = str(explain(training.scaler))
        assert "The inputs of that forward were no longer kept." in text
        assert "No scale can help. watch(model, scaler, keep=2) keeps the inputs of all 2 backward passes:" in text
    assert "what is told of modules" not in text, "nothing is told of modules"
    assert not (tmp_path / "batch.pt").exists()


def test_a_batch_that_was_not_saved_is_told(make: Callable[..., Any], tmp_path: Path) -> None:
    """At the skip whose batch could not be had, beside the reason; a later one that can be had is saved."""
    training = Training(make(init_scale=4.0), keep=1, save_batch=tmp_path / "batch.pt")
    training.update(400, 1)
    assert "So no batch was saved." in str(explain(training.scaler))
    training.update(1, 400)
    assert torch.load(tmp_path / "batch.pt", weights_only=False)["args"][0][0, 0].item() == 400


def test_the_batch_of_an_early_backward_is_saved(make: Callable[..., Any], tmp_path: Path) -> None:
    """The batch of the backward that was at fault, not that of the last one."""
    training = Training(make(init_scale=4.0), save_batch=tmp_path / "batch.pt")
    training.update(1, 400, 2)
    assert torch.load(tmp_path / "batch.pt", weights_only=False)["args"][0][0, 0].item() == 400


def test_an_update_of_one_backward_keeps_one_batch(make: Callable[..., Any]) -> None:
    """Without accumulation no more is kept than the last forward, also while an update goes on."""
    training = Training(make(init_scale=4.0))
    kept = training.watch.kept
    for size in (1, 2):
        training.update(size)
        assert [[forward.inputs[0][0][0, 0].item() for forward in kept.latest()], len(kept)] == [[size], 1]


def test_after_an_update_the_last_backward_alone_is_kept(make: Callable[..., Any]) -> None:
    """What was kept of an update's other backward passes is let go of at its end."""
    training = Training(make(init_scale=4.0))
    training.update(1, 2, 3)
    assert [forward.inputs[0][0][0, 0].item() for forward in training.watch.kept.latest()] == [3]
    assert len(training.watch.kept) == 1


def test_two_losses_of_one_forward_share_it(make: Callable[..., Any]) -> None:
    """The second of two losses is scaled without a forward of its own: the one before the first is told of."""
    training = Training(make(init_scale=4.0))
    output = training.model(torch.ones(2, 4))
    training.scaler.scale(output.mean()).backward(retain_graph=True)
    training.scaler.scale(output.mean() * math.nan).backward()
    training.scaler.step(training.optimizers[0])
    explanation = explain(training.scaler)
    assert explanation.reason == "made by the loss function, outside the model"
    assert "backward 2 of 2" in str(explanation)


def test_a_forward_that_is_gone_is_not_replaced_by_an_earlier_one() -> None:
    """A loss without a forward of its own goes back to the nearest one, unless that is no longer kept."""
    kept = Kept(2)
    for number in range(3):
        if number == 0:
            kept.open.append(forward(KIB))
        kept.scaled(number)
        assert [bool(kept.of(number)), kept.of(number) is None] == [number < 2, number == 2]
    kept.scaled(0)
    assert kept.of(0) == []


def forward(nbytes: int) -> Forward:
    """A forward with inputs of so many bytes."""
    return Forward(((torch.zeros(nbytes, dtype=torch.uint8),), {}), Surroundings([torch.device("cpu")]), [0])


def numbers(kept: Kept, of: int) -> list[int]:
    """Which of so many backward passes are kept."""
    return [number for number in range(of) if kept.of(number) is not None]


def test_the_bound_keeps_the_first_ones_and_the_last() -> None:
    """Inputs of 1 MiB and 32 KiB for what is not in them: 248 of them are 255.75 MiB and one more is beyond 256."""
    kept = Kept(None)
    shared = torch.zeros(2**20, dtype=torch.uint8)
    for number in range(260):
        kept.open.append(Forward(((shared,), {}), None, [0]))  # type: ignore[arg-type]
        kept.scaled(number)
    assert (_kept.BOUND, _kept.BESIDE) == (256 * KIB * KIB, 32 * KIB)
    assert numbers(kept, 260) == [*range(248), 259]


def test_one_batch_is_kept_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is on what is kept beside the latest backward, which is always kept."""
    monkeypatch.setattr(_kept, "BOUND", KIB)
    kept = Kept(None)
    for number in range(3):
        kept.open.append(forward(2 * KIB))
        kept.scaled(number)
        assert numbers(kept, 3) == [number]


def test_a_number_keeps_the_last_so_many_whatever_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says how many gets them, beyond the bound."""
    monkeypatch.setattr(_kept, "BOUND", KIB)
    kept = Kept(2)
    for number in range(4):
        kept.open.append(forward(2 * KIB))
        kept.scaled(number)
    assert numbers(kept, 4) == [2, 3]


@pytest.mark.parametrize("keep", [0, -1])
def test_a_number_below_one_is_refused(keep: int) -> None:
    """The message names what was given."""
    with pytest.raises(ValueError, match=f"keep={keep}"):
        watch(net(), GradScaler(), keep=keep)


def test_updates_in_a_row_are_counted_not_optimizers(make: Callable[..., Any]) -> None:
    """Three updates that both optimizers skip are three; each of the two is told the same of the module."""
    training = Training(make(init_scale=2.0**10), optimizers=2)
    calls: list[int] = []
    training.model[1].register_forward_hook(lambda *args: calls.append(1))
    for _ in range(3):
        training.update(400)
    assert len(calls) == 3 + 2, "each update ran its forward; the 1st and the 2nd once more, for both"
    causes = explain(training.scaler).causes
    assert [cause.where for cause in causes] == [("1",), ("1",)]
    assert all(sum("3 updates in a row" in sentence for sentence in cause.sentences) == 1 for cause in causes)


def test_the_head_counts_updates_and_names_optimizers_where_there_are_several(make: Callable[..., Any]) -> None:
    """One update that two optimizers skipped is not two steps one after the other."""
    for optimizers, head in (
        (1, "1 step skipped at update 0, scale 4:"),
        (2, "The steps of 2 optimizers were skipped at update 0, scale 4:"),
    ):
        training = Training(make(init_scale=4.0), optimizers)
        training.update(400)
        assert str(explain(training.scaler)).splitlines()[0] == head


def test_a_row_of_which_nothing_is_told_of_modules_does_not_speak_of_them(make: Callable[..., Any]) -> None:
    """Without a replay a row is counted, and why nothing is known of modules stands beside it, each time."""
    training = Training(make(init_scale=2.0**10), replay=False)
    for number in range(1, 4):
        training.update(400)
        text = str(explain(training.scaler))
        assert "watch() was told replay=False" in text
        assert "No scale can help. Without replay=False the layer is told" in text
        assert "what is told of modules" not in text
        assert ("3 updates in a row were skipped for this." in text) is (number == 3)
