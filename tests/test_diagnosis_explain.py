"""What an explanation holds and how it is shown; what is known without a watch.

Facts are made by small trainings whose overflow is known on paper.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lucid.amp import GradScaler
from lucid.amp._causes import NonFinite
from lucid.amp.diagnosis import explain, watch
from lucid.amp.diagnosis._kinds import ADVICE, Kind, Reason
from lucid.amp.diagnosis._words import Cause, few, number

INF = math.inf


def torch_scaler(**settings: Any) -> Any:
    """PyTorch's scaler for the CPU."""
    return torch.amp.GradScaler("cpu", **settings)


def skip(scaler: Any, parameter: nn.Parameter, gradient: list[float], name: str = "w") -> None:
    """One iteration whose scaled gradient is given."""
    optimizer = torch.optim.SGD([(name, parameter)], lr=0.1)
    scaler.scale(torch.zeros(()))
    parameter.grad = torch.tensor(gradient)
    scaler.step(optimizer)
    scaler.update()


def test_lucid_s_scaler_knows_by_itself() -> None:
    """Without a watch: which gradients were not finite, at which update and scale, and that the kind is not known."""
    scaler = GradScaler(init_scale=4.0)
    skip(scaler, nn.Parameter(torch.zeros(3)), [INF, math.nan, 8.0])
    explanation = explain(scaler)
    assert (explanation.kind, explanation.where, explanation.update, explanation.scale) == ("not known", ("w",), 0, 4.0)
    assert explanation.causes[0].gradients == (NonFinite("w", (3,), 1, 1, 2.0),)
    assert "diagnosis.watch(model, scaler)" in str(explanation)


def test_it_stays_known_after_good_steps() -> None:
    """The last skip is told also when later steps landed; its number is then no longer known."""
    scaler, parameter = GradScaler(init_scale=4.0), nn.Parameter(torch.zeros(1))
    skip(scaler, parameter, [INF])
    skip(scaler, parameter, [1.0])
    explanation = explain(scaler)
    assert explanation.where == ("w",) and explanation.update is None


def test_pytorch_s_scaler_needs_a_watch() -> None:
    """Nobody listened: the text says so, and what to call."""
    scaler = torch_scaler(init_scale=4.0)
    skip(scaler, nn.Parameter(torch.zeros(1)), [INF])
    explanation = explain(scaler)
    assert explanation.causes == () and explanation.kind is None and explanation.where == ()
    assert str(explanation).startswith("Nothing is known of this scaler")
    assert "diagnosis.watch(model, scaler)" in str(explanation)


@pytest.mark.parametrize("make", [GradScaler, torch_scaler])
def test_nothing_was_skipped(make: Callable[..., Any]) -> None:
    """A watched scaler without a skip says how many updates it made."""
    scaler, model = make(init_scale=4.0), nn.Linear(1, 1)
    watch(model, scaler, report=None)
    skip(scaler, model.bias, [1.0])
    assert str(explain(scaler)) == "No step was skipped in 1 watched update."
    assert str(explain(GradScaler())) == "No step of this scaler was skipped."


@pytest.mark.parametrize("make", [GradScaler, torch_scaler])
def test_it_can_be_asked_before_the_update(make: Callable[..., Any]) -> None:
    """Between ``step`` and ``update`` the skip is known already."""
    scaler, model = make(init_scale=4.0), nn.Linear(1, 1)
    watch(model, scaler, report=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1)).sum() * INF).backward()
    scaler.step(optimizer)
    assert explain(scaler).kind == "loss not finite"


def test_what_is_no_scaler_is_refused() -> None:
    """The message names what was given."""
    with pytest.raises(TypeError, match="takes a gradient scaler, got Linear"):
        explain(nn.Linear(1, 1))


def test_a_float16_loss_is_told() -> None:
    """A float16 loss that the scale takes beyond 65504 is named as what overflowed."""
    scaler, model = torch_scaler(init_scale=65536.0), nn.Linear(1, 1)
    watch(model, scaler, report=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(1, 1)).sum()
    assert loss.dtype is torch.float16
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert explain(scaler).kind == "backward overflowed"
    assert "The loss was float16" in str(explain(scaler))


def explained(model: nn.Module, batch: torch.Tensor, factor: float = 1.0) -> Any:
    """What is said of one watched iteration under float16 autocast; the loss is the output's sum times a factor."""
    scaler = GradScaler(init_scale=4.0)
    watch(model, scaler, report=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.float16):
        output = model(batch)
    scaler.scale(output.float().sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    return explain(scaler)


def test_weights_that_are_not_finite_are_named_as_the_reason() -> None:
    """Sound inputs and a NaN among the weights: an earlier step let it in."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].weight.data[0, 0] = math.nan
    explanation = explained(model, torch.ones(1, 2))
    assert (explanation.reason, explanation.where) == ("weights are not finite", ("1",))


def test_gradients_that_float16_flushed_are_told_from_dead_modules() -> None:
    """Nothing was skipped and no module is silent: the gradients were too small for float16 at this scale."""
    explanation = explained(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), torch.ones(1, 2), factor=1e-12)
    assert (explanation.kind, explanation.reason) == ("gradients exactly zero", "too small for float16 at this scale")
    assert str(explanation).startswith("No step was skipped, but:")
    assert "Raise the scale" in str(explanation)


def test_a_model_that_computes_its_own_loss() -> None:
    """Where the loss is the model's own code, the model itself is named, and that no precision helps."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) / 0.0

    explanation = explained(WithLoss(), torch.ones(1, 2))
    assert (explanation.reason, explanation.where) == ("not finite in float32 either", ("the model itself",))


def test_what_cannot_be_traced_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the diagnosis itself becomes a sentence."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr("lucid.amp.diagnosis._trace.replay", fail)
    explanation = explained(nn.Sequential(nn.Linear(2, 1)), torch.ones(1, 2), factor=INF)
    assert explanation.kind == "loss not finite"
    assert "It could not be traced to a module: RuntimeError: no idea." in str(explanation)


def watched_skip() -> Any:
    """An explanation with a cause that has gradients."""
    scaler, model = GradScaler(init_scale=4.0), nn.Sequential(nn.Linear(2, 2))
    watch(model, scaler, report=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.tensor([[INF, 1.0]])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return explain(scaler)


def test_the_text() -> None:
    """First what happened, then the cause, what was seen, what to do, and the gradients in the optimizer's order."""
    lines = str(watched_skip()).splitlines()
    assert lines[0] == "1 step skipped at update 0, scale 4:"
    assert lines[1] == "  SGD: loss not finite in 0 (the batch itself is not finite)"
    assert lines[3] == "    The batch that went into the model held 1 inf and 0 NaN among 2 values."
    assert lines[-2].startswith("    No scale can help. Mend the data")
    assert lines[-1] == "      0.weight  2 inf, 0 NaN of 2×2, largest finite 1"


def test_the_data_goes_through_json() -> None:
    """Everything is plain; a cause comes back from it."""
    explanation = watched_skip()
    data = json.loads(json.dumps(explanation.as_dict()))
    assert (data["update"], data["scale"], data["updates"]) == (0, 4.0, 1)
    assert Cause.from_dict(data["causes"][0]) == explanation.causes[0]


def test_a_notebook_gets_html_that_is_safe() -> None:
    """Names are escaped; each gradient has a row."""
    scaler = GradScaler(init_scale=4.0)
    skip(scaler, nn.Parameter(torch.zeros(1)), [INF], name="<b>&w")
    page = explain(scaler)._repr_html_()
    assert "&lt;b&gt;&amp;w" in page and "<b>&w" not in page
    assert page.count("<tr>") == 2


def test_many_gradients_are_shortened_in_text_only() -> None:
    """Eight of ten are shown; the data has all."""
    scaler = GradScaler(init_scale=4.0)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(10)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.tensor([INF])
    scaler.step(optimizer)
    explanation = explain(scaler)
    assert len(explanation.causes[0].gradients) == 10
    assert str(explanation).endswith("      and 2 more")


def test_every_kind_and_reason_has_advice() -> None:
    """Nobody is left without a next move."""
    assert set(ADVICE) == {*Kind, *Reason}
    assert all(text.endswith(".") for text in ADVICE.values())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.0, "1"), (0.00012345, "0.000123"), (1234.5, "1,234"), (2.0**40, "1.1e+12"), (INF, "inf")],
)
def test_numbers_for_people(value: float, text: str) -> None:
    """Three digits, thousands apart, words for what is no number."""
    assert number(value) == text


def test_a_few_names() -> None:
    """Five are listed, the rest counted; a model without a name is called so."""
    assert few(["a", ""]) == '"a", the model itself'
    assert few(list("abcdefg")) == '"a", "b", "c", "d", "e" and 2 more'
