"""The range report: numbers on paper for gradients that are set by hand, and the words and pictures made of them.

Float16 ends at 65504, is normal down to 2⁻¹⁴ and holds nothing below 2⁻²⁴ but zero.
"""

import builtins
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lucid.amp import GradScaler
from lucid.amp.diagnosis import Ranges, ranges, watch
from lucid.amp.diagnosis._ranges_picture import _chosen
from lucid.amp.diagnosis._ranges_shown import COLUMNS, percent, power
from lucid.amp.diagnosis._spread import Fate


def torch_scaler(**settings: Any) -> Any:
    """PyTorch's scaler for the CPU."""
    return torch.amp.GradScaler("cpu", **settings)


MAKERS = pytest.mark.parametrize("make", [GradScaler, torch_scaler], ids=["lucid", "torch"])


class Holds(nn.Module):
    """Holds parameters whose gradients are given."""

    def __init__(self, **gradients: list[float]) -> None:
        super().__init__()
        for name, values in gradients.items():
            parameter = nn.Parameter(torch.zeros(len(values)))
            parameter.grad = torch.tensor(values)
            self.register_parameter(name, parameter)


def test_a_row_on_paper() -> None:
    """Largest, median, zeros, subnormals and bits of a handful of values, at scale 1."""
    [row] = ranges(Holds(a=[0.0, 2.0**-30, -(2.0**-20), 1.0, -8188.0])).rows
    assert (row.name, row.what, row.shape) == ("a", "parameter", (5,))
    assert (row.largest, row.median) == (8188.0, 2.0**-20)
    assert row.fate() == Fate(zero=20.0, flush=20.0, subnormal=20.0, overflow=0.0)
    assert row.spread.unused_bits == pytest.approx(3.0)


def test_what_would_become_of_it_at_other_scales() -> None:
    """At 2⁸ times the scale the largest overflows and the smallest survives; at 2⁻⁸ times it more is flushed."""
    [row] = ranges(Holds(a=[2.0**-30, 2.0**-20, 1.0, 8188.0])).rows
    assert row.fate(8) == Fate(0.0, 0.0, 25.0, 25.0)
    assert row.fate(-8) == Fate(0.0, 50.0, 0.0, 0.0)
    assert row.fate(3).overflow == 0.0 and row.fate(4).overflow == 25.0


@MAKERS
@pytest.mark.parametrize("unscaled", [True, False])
def test_the_scale_is_taken_into_account(make: Callable[..., Any], unscaled: bool) -> None:
    """Scaled or not, the row tells of the true gradient, and of its fate at the scale."""
    model = Holds(a=[2.0**-30, 0.25] if unscaled else [2.0**-20, 256.0])
    report = ranges(model, make(init_scale=1024.0), unscaled=unscaled)
    assert report.scale == 1024.0
    assert (report.rows[0].largest, report.rows[0].fate()) == (0.25, Fate(0.0, 0.0, 50.0, 0.0))


def test_a_scale_that_is_no_power_of_two() -> None:
    """At scale 1000 a true gradient of 66 would be 66000: it overflows."""
    report = ranges(Holds(a=[66.0, 65.0]), GradScaler(init_scale=1000.0), unscaled=True)
    assert report.rows[0].fate().overflow == 50.0
    assert report.rows[0].largest == pytest.approx(66.0)


@pytest.mark.parametrize("make", [GradScaler, torch_scaler], ids=["lucid", "torch"])
def test_a_watched_scaler_tells_whether_gradients_were_divided(make: Callable[..., Any]) -> None:
    """After backward, unscale_, step and update alike the true gradient is told."""
    model, scaler = nn.Linear(2, 1, bias=False), make(init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch(model, scaler, report=None)

    def largest() -> float:
        return ranges(model, scaler).rows[0].largest

    scaler.scale(model(torch.tensor([0.5, 0.25])).sum()).backward()
    seen = [largest()]
    scaler.unscale_(optimizer)
    seen.append(largest())
    scaler.step(optimizer)
    seen.append(largest())
    scaler.update()
    seen.append(largest())
    assert seen == [0.5] * 4


def test_lucid_s_scaler_tells_it_unwatched_within_an_iteration() -> None:
    """Between ``unscale_`` and ``update`` the scaler itself knows."""
    model, scaler = nn.Linear(2, 1, bias=False), GradScaler(init_scale=1024.0)
    scaler.scale(model(torch.tensor([0.5, 0.25])).sum()).backward()
    assert ranges(model, scaler).rows[0].largest == 0.5
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    assert ranges(model, scaler).rows[0].largest == 0.5


@pytest.mark.parametrize(
    ("largest", "recommended"),
    [(1.0, 2.0**12), (65504.0 / 8, 1.0), (65504.0, 2.0**-3), (2.0**-20, 2.0**32), (1e-45, 2.0**127)],
)
def test_the_recommended_scale(largest: float, recommended: float) -> None:
    """The largest power of two that leaves three bits below 65504, within the bounds of a scale."""
    report = ranges(Holds(a=[largest], b=[largest / 2]))
    assert report.recommended_scale == recommended


@pytest.mark.parametrize("gradient", [[0.0], [math.nan], [math.inf]])
def test_nothing_to_recommend(gradient: list[float]) -> None:
    """Where everything is zero or not finite no scale is recommended, and the text says so."""
    report = ranges(Holds(a=gradient))
    assert report.recommended_scale is None
    assert "No scale can be recommended" in str(report)


@pytest.mark.parametrize(
    ("gradient", "said"),
    [
        ([1.0, 0.5], "even without scaling"),
        ([2.0**-28, 2.0**-27], "with a scale near 2³⁹"),
        ([1000.0, 2.0**-40], "span more than float16 holds"),
    ],
)
def test_would_float16_work_here(gradient: list[float], said: str) -> None:
    """Without a scaler the report answers the question."""
    assert said in str(ranges(Holds(a=gradient)))


COMPARED = {
    1.0: "2¹² times smaller",
    2.0**12: "in force fits",
    # 65504 is a little less than 2¹⁶.
    2.0**14: "2² times larger and leaves one bit instead of three: a batch with larger gradients may cost a skipped",
    2.0**15: "2³ times larger and leaves less than one bit instead of three",
    2.0**16: "2⁴ times larger, beyond what float16 holds: expect skipped steps until it has come down.",
    2.0**20: "2⁸ times larger, beyond what float16 holds",
}


@pytest.mark.parametrize("scale", COMPARED)
def test_the_scale_in_force_is_compared(scale: float) -> None:
    """For a largest gradient of 1 the recommended scale is 2¹²; skips are foretold only where nothing is left."""
    assert COMPARED[scale] in str(ranges(Holds(a=[1.0]), GradScaler(init_scale=scale), unscaled=True))


def test_one_layer_that_is_lost_is_not_averaged_away() -> None:
    """A small layer whose gradients are all flushed unscaled keeps float16 from being recommended unscaled."""
    text = str(ranges(Holds(a=[2.0**-30], b=[1.0] * 1000)))
    assert "even without scaling" not in text
    assert "with a scale near 2¹²" in text


def test_it_does_not_say_that_flushing_means_failing() -> None:
    """Every report says that flushed gradients do not by themselves mean that a network fails to learn."""
    assert "does not by itself mean that a network fails to learn" in str(ranges(Holds(a=[1.0])))


def test_what_is_not_finite_is_told_apart() -> None:
    """Counts of inf and NaN are in the data, and the row says that the rest alone is told of."""
    report = ranges(Holds(a=[math.inf, math.nan, 2.0]))
    assert (report.rows[0].not_finite, report.rows[0].largest) == (2, 2.0)
    assert "[2 not finite]" in str(report) and 'the rest alone is told of: "a"' in str(report)


def test_parameters_without_a_gradient_are_named_and_frozen_ones_are_not() -> None:
    """A parameter that should have a gradient and has none is listed."""
    model = Holds(a=[1.0], b=[1.0], c=[1.0])
    model.b.grad = None
    model.c.grad = None
    model.c.requires_grad_(False)
    assert ranges(model).without == ("b",)


def test_no_gradient_at_all_is_an_error() -> None:
    """The message says when to call it."""
    with pytest.raises(RuntimeError, match=r"Call it after backward\(\)"):
        ranges(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="takes a module first, got GradScaler"):
        ranges(GradScaler(), nn.Linear(1, 1))


def test_a_disabled_scaler_is_none() -> None:
    """A bfloat16 run that kept its disabled scaler is told as one without."""
    assert ranges(Holds(a=[1.0]), GradScaler(enabled=False)).scale is None


def test_all_parameters_together() -> None:
    """Percentages over the model count elements, not parameters."""
    report = ranges(Holds(a=[0.0], b=[1.0, 1.0, 1.0]))
    assert report.fate() == Fate(25.0, 0.0, 0.0, 0.0)


@MAKERS
def test_gradients_of_outputs(make: Callable[..., Any]) -> None:
    """A watch with ``outputs=1`` adds a row for each module's output, with the true gradient and the output itself."""
    model, scaler = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), make(init_scale=1024.0)
    model[0].weight.data.fill_(3.0)
    model[1].weight.data.fill_(0.5)
    watch(model, scaler, report=None, outputs=1)
    scaler.scale(model(torch.tensor([2.0])).sum()).backward()
    rows = [row for row in ranges(model, scaler).rows if row.what == "output"]
    assert [(row.name, row.largest, row.largest_output) for row in rows] == [("0", 0.5, 6.0), ("1", 1.0, 3.0)]
    assert "0 (output)" in str(ranges(model, scaler))


def test_outputs_are_measured_in_every_nth_forward_only() -> None:
    """Between measured forwards there is no hook; the last measured ones stay."""
    model = nn.Sequential(nn.Linear(1, 1))
    handle = watch(model, outputs=3)
    largest = []
    for x in (1.0, 2.0, 3.0, 4.0):
        model(torch.tensor([x])).sum().backward()
        largest.append(handle.outputs.measured()[0].largest.item() - model[0].bias.item())
        assert not model[0]._forward_hooks
    expected = [(model[0].weight * x).item() for x in (1.0, 1.0, 1.0, 4.0)]
    assert largest == pytest.approx([abs(value + model[0].bias.item()) - model[0].bias.item() for value in expected])


def test_of_a_module_that_is_called_twice_the_last_call_counts() -> None:
    """The output's and the gradient's numbers belong to one call."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(1, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.scale(x))

    model = Twice()
    model.scale.weight.data.fill_(2.0)
    watch(model, outputs=1)
    (model(torch.tensor([1.0])) * 5).sum().backward()
    [row] = [row for row in ranges(model).rows if row.what == "output"]
    assert (row.largest, row.largest_output) == (5.0, 4.0)


def test_outputs_follow_a_scale_that_has_moved() -> None:
    """A row measured at another scale is told at the scale in force; after the watch there is no such row."""
    model, scaler = nn.Sequential(nn.Linear(1, 1)), GradScaler(init_scale=1024.0)
    handle = watch(model, scaler, report=None, outputs=1)
    scaler.scale(model(torch.tensor([2.0])).sum()).backward()
    scaler.update(2.0**20)
    [row] = [row for row in ranges(model, scaler).rows if row.what == "output"]
    assert (row.largest, row.spread.largest, row.fate()) == (1.0, 2.0**20, Fate(0.0, 0.0, 0.0, 100.0))
    handle.remove()
    assert [row.what for row in ranges(model, scaler).rows] == ["parameter", "parameter"]


def test_what_is_lost_inside_the_backward_is_told() -> None:
    """A gradient that float16 would flush at an output, though the parameters' gradients are large, is named."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight.data.fill_(2.0**-30)
    watch(model, outputs=1)
    model(torch.tensor([2.0**30])).sum().backward()
    assert 'at the output of "0": 100 % of what is not zero' in str(ranges(model))


def test_an_output_beyond_float16_is_told() -> None:
    """A float32 run whose activations would overflow learns it."""
    model = nn.Sequential(nn.Linear(1, 1))
    watch(model, outputs=1)
    model(torch.tensor([1e6])).sum().backward()
    assert 'The output of "0" reaches' in str(ranges(model))


def test_an_output_that_is_nan_is_not_said_to_be_beyond_65504() -> None:
    """NaN is no large number; inf is."""
    model = nn.Sequential(nn.Linear(1, 1))
    for value, told in (
        (math.nan, 'The output of "0" holds NaN.'),
        (math.inf, 'The output of "0" reaches inf: beyond'),
    ):
        with watch(model, outputs=1):
            model(torch.tensor([value])).sum().backward()
            assert told in str(ranges(model))


@pytest.mark.parametrize(("scale", "words"), [(2.0**-84, "2⁻⁸⁴"), (3e-20, "3e-20"), (0.5, "0.5"), (65536.0, "65,536")])
def test_a_tiny_scale_is_told_as_a_power_of_two(scale: float, words: str) -> None:
    """Where it is one: 5.17e-26 says nothing."""
    model = Holds(a=[1.0])
    model.a.grad = torch.tensor([1.0])
    assert str(ranges(model, GradScaler(scale))).startswith(f"At scale {words}, of")


def test_bfloat16_and_float64_gradients() -> None:
    """Their values are measured as they are."""
    model = Holds(a=[1.0])
    for dtype in (torch.bfloat16, torch.float64):
        model.a.data = model.a.data.to(dtype)
        model.a.grad = torch.tensor([0.5], dtype=dtype)
        assert ranges(model).rows[0].largest == 0.5


def test_nothing_is_changed() -> None:
    """Gradients stay as they are."""
    model = Holds(a=[1.0, -2.0])
    ranges(model, GradScaler(), unscaled=True)
    assert model.a.grad.tolist() == [1.0, -2.0]


def test_the_data_is_plain() -> None:
    """Everything goes through JSON; each row has its fate at 17 scales, and the histogram."""
    data = json.loads(json.dumps(ranges(Holds(a=[0.0, 1.0, 4.0]), GradScaler(), unscaled=True).as_dict()))
    [row] = data["rows"]
    assert len(row["at"]) == 17 and row["at"]["0"] == row["now"]
    assert row["log2"] == {"16": pytest.approx(100 / 3), "18": pytest.approx(100 / 3)}


def report() -> Ranges:
    """A report with every kind of bar: zero, flushed, subnormal, normal, overflowing."""
    return ranges(Holds(a=[0.0, 2.0**-40, 2.0**-20, 1.0, 1e6], b=[1.0, 2.0]))


def test_the_text_is_a_table() -> None:
    """A line a row, under the columns, with what is flushed and what overflows at other scales."""
    lines = str(report()).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("gradient"))
    assert lines[head].split() == list(COLUMNS)
    assert lines[head + 1].split()[:3] == ["a", "1,000,000", "9.54e-07"]
    assert "20.0↓ 20.0↑" in lines[head + 1]
    assert lines[head + 2].startswith("b ")


def test_the_table_for_a_terminal_cuts_no_number() -> None:
    """In eighty columns names may be folded; every number stands in full."""
    rich_console = pytest.importorskip("rich.console", reason="rich comes with the demo extra")
    model = Holds(**{"a_parameter_with_a_long_name_" * 3: [1e6, 2.0**-40, 0.0]})
    console = rich_console.Console(width=80, record=True, file=io.StringIO())
    console.print(ranges(model).table())
    text = console.export_text()
    assert "1,000,000" in text and "33.3↓" in text and "…" not in text


def test_a_notebook_gets_a_table() -> None:
    """One row a gradient and one for the head; names are escaped."""
    page = ranges(Holds(**{"a<b": [1.0]}))._repr_html_()
    assert page.count("<tr>") == 2 and "a&lt;b" in page


def test_the_picture(tmp_path: Path) -> None:
    """A panel a row, the window's three edges in each, and a file where one is asked for."""
    pytest.importorskip("matplotlib", reason="matplotlib comes with the demo extra")
    path = tmp_path / "ranges.png"
    figure = report().plot(path)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["a", "b"]
    for axes in panels:
        edges = {line.get_xdata()[0] for line in axes.lines}
        assert {-24, -14, 16} <= edges
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bars_stand_where_the_gradients_are() -> None:
    """Heights are percent of all elements; what is lost is hatched, so that no colour is needed to see it."""
    pytest.importorskip("matplotlib", reason="matplotlib comes with the demo extra")
    axes = report().plot().axes[0]
    bars = {(bar.get_x(), bool(bar.get_hatch())): bar.get_height() for bar in axes.patches if hasattr(bar, "get_x")}
    assert {key: height for key, height in bars.items() if height == 20.0 and key[0] != axes.get_xlim()[0]} == {
        (-40, True): 20.0,
        (-20, False): 20.0,
        (0, False): 20.0,
        (19, True): 20.0,
    }
    assert axes.get_title(loc="right") == "zero 20.0 %"


HOPELESS = {"all NaN": [math.nan] * 4, "all inf": [math.inf] * 4, "all inf or NaN": [math.inf, math.nan] * 2}


@pytest.mark.parametrize("words", HOPELESS)
@pytest.mark.parametrize("scale", [None, 2.0**-104])
def test_a_panel_without_a_finite_element_says_so(words: str, scale: float | None) -> None:
    """Instead of an empty panel with an axis of nothing: what the gradient consists of."""
    pytest.importorskip("matplotlib", reason="matplotlib comes with the demo extra")
    model = nn.Linear(4, 1, bias=False)
    model.weight.grad = torch.tensor([HOPELESS[words]])
    scaler = None if scale is None else GradScaler(scale)
    axes = ranges(model, scaler).plot().axes[0]
    assert [text.get_text() for text in axes.texts] == [words]
    assert list(axes.get_yticks()) == []


def test_what_is_not_finite_in_part_stands_in_the_panel() -> None:
    """A quarter of the elements is NaN and a quarter inf, a quarter zero: told beside the bars of the rest."""
    pytest.importorskip("matplotlib", reason="matplotlib comes with the demo extra")
    model = nn.Linear(4, 1, bias=False)
    model.weight.grad = torch.tensor([[math.nan, math.inf, 0.0, 1.0]])
    axes = ranges(model).plot().axes[0]
    assert [text.get_text() for text in axes.texts] == ["inf 25.0 %, NaN 25.0 %"]
    assert axes.get_title(loc="right") == "zero 25.0 %"
    assert len(axes.get_yticks()) > 1


def test_the_picture_of_many_shows_some() -> None:
    """The first, the last and those between at even distances; the title says how many."""
    pytest.importorskip("matplotlib", reason="matplotlib comes with the demo extra")
    many = ranges(Holds(**{f"p{number:03}": [1.0] for number in range(50)}))
    figure = many.plot(at_most=4)
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()] == [
        "p000",
        "p016",
        "p033",
        "p049",
    ]
    assert "4 of 50" in figure.get_suptitle()
    assert len(_chosen(many.rows, 1)) == 1


@pytest.mark.parametrize(("module", "asked"), [("rich", "table"), ("matplotlib", "plot")])
def test_a_missing_extra_says_what_to_install(module: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, naming the extra."""
    real = builtins.__import__

    def without(name: str, *scope: Any) -> Any:
        if name.partition(".")[0] == module:
            raise ModuleNotFoundError(name)
        return real(name, *scope)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ModuleNotFoundError, match=rf"needs {module}: pip install 'lucid-amp\[demo\]' \(in a checkout: "
    ):
        getattr(report(), asked)()


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.04, "<0.1"), (12.34, "12.3"), (99.95, ">99.9"), (100.0, "100")]
)
def test_percentages_for_people(value: float, text: str) -> None:
    """A little is never nothing, and almost all never all."""
    assert percent(value) == text


def test_powers_in_print() -> None:
    """Exponents are raised, signs too."""
    assert (power(16), power(-24)) == ("2¹⁶", "2⁻²⁴")
