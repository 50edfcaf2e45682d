"""The report of a run: what it finds, how grave it is, what to do; read back from what a run wrote.

Runs are made by hand here, line by line, so that each finding is told from a record that is known.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lucid.amp._journal import Journal
from lucid.amp._schedule import ScaleUpdate
from lucid.amp.cli import Refusal, report
from lucid.amp.cli.report._build import content_of
from lucid.amp.cli.report._content import Cell, Column, Content, Finding, Section, Table
from lucid.amp.cli.report._findings import findings
from lucid.amp.cli.report._page import page
from lucid.amp.cli.report._run import read
from lucid.amp.cli.report._text import plural, power, span
from lucid.amp.cli.run._sampler import Sampler
from lucid.amp.diagnosis import watch
from lucid.amp.history import History

LOSS, BACKWARD, STALE = "loss not finite", "backward overflowed", "gradients never cleared"

SCALER = {
    "class": "torch.amp.grad_scaler.GradScaler",
    "enabled": True,
    "settings": {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
}


def cause(kind: str, where: tuple[str, ...] = (), reason: str | None = None) -> dict[str, Any]:
    """A cause as ``diagnosis`` writes it."""
    sentences = [f"Seen: {kind}.", f"Advice about {kind}."]
    return {"kind": kind, "reason": reason, "where": where, "sentences": sentences, "gradients": [], "rank": 0}


class Folder:
    """A run that is written by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {
            "name": "train.py",
            "command": ["train.py", "--lr", "0.1"],
            "started": 1.0e9,
            "ended": 1.0e9 + 75,
            "ending": "exit 0",
            "lucid": "0.1.0",
            "torch": "2.13.0",
            "python": "3.11.7",
            "device": "CPU",
            "scalers": [SCALER],
            "models": [],
            "notes": [],
        }

    def updates(self, kinds: list[str | None], scale: float = 1024.0, number: int = 0) -> None:
        """An update for each: a skip of that kind, which halves the scale, or None for one that landed."""
        more = f"-{number + 1}" if number else ""
        with History(path=self.path / f"updates{more}.jsonl") as history:
            causes = Journal(self.path / f"causes{more}.jsonl")
            for step, kind in enumerate(kinds):
                after = scale / 2 if kind else scale
                history.add(
                    ScaleUpdate(step, scale, after, bool(kind), (bool(kind),)), kind, ["a.module"] if kind else []
                )
                if kind:
                    causes.append(step, {"causes": [cause(kind, ("a.module",), "a reason")]})
                scale = after
            causes.close()

    def told(self, **facts: Any) -> tuple[Finding, ...]:
        """The findings, the most useful first."""
        self.path.joinpath("run.json").write_text(json.dumps({**self.facts, **facts}))
        return findings(read(self.path))

    def findings(self, **facts: Any) -> list[tuple[str, str]]:
        """Weight and title of each finding."""
        return [(finding.weight, finding.title) for finding in self.told(**facts)]

    def content(self, **facts: Any) -> Content:
        """The whole report, pictures and all."""
        self.told(**facts)
        return content_of(read(self.path))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An empty run."""
    return Folder(tmp_path)


def test_a_quiet_run_needs_nothing(folder: Folder) -> None:
    """No skip: one finding, and it says that all is well."""
    folder.updates([None] * 30)
    assert folder.findings() == [("fine", "No step was skipped")]
    assert folder.content().verdict == "All 30 updates landed. Nothing need be changed."


def test_updates_without_a_step_are_not_called_well(folder: Folder) -> None:
    """Where no optimizer was stepped through the scaler, nothing was checked, and nothing is called finite."""
    with History(path=folder.path / "updates.jsonl") as history:
        for step in range(5):
            history.add(ScaleUpdate(step, 64.0, 64.0, False, ()))
    assert folder.findings() == [("look", "No optimizer was stepped through the scaler")]


def test_a_search_at_the_beginning_is_no_fault(folder: Folder) -> None:
    """Skips before the first step that lands are the scale coming down; the start that saves them is named."""
    folder.updates([BACKWARD] * 4 + [None] * 30)
    (finding,) = folder.told()
    assert (finding.weight, finding.title) == ("fine", "The scale was too high at first: 4 steps skipped")
    assert "from 2¹⁰ to 2⁶" in finding.facts[0]
    assert "init_scale=64" in finding.advice


def moves(folder: Folder, scales: list[float], last: float) -> None:
    """An update at each scale; where the next one is smaller, the backward overflowed."""
    with History(path=folder.path / "updates.jsonl") as history:
        for step, (scale, after) in enumerate(zip(scales, [*scales[1:], last], strict=True)):
            skipped = after < scale
            history.add(ScaleUpdate(step, scale, after, skipped, (skipped,)), BACKWARD if skipped else None, ["a"])


def test_the_start_that_is_suggested_is_where_the_scale_settled(folder: Folder) -> None:
    """Down with steps that land in between, up once and further down: the place is what the scale comes back to."""
    down = [1024.0] + [512.0] * 4 + [256.0] * 60 + [512.0, 256.0]
    moves(folder, down + ([128.0] * 60 + [256.0] * 3) * 3, 128.0)
    search, later = folder.told()
    assert search.title == "The scale was too high at first: 4 steps skipped"
    assert search.facts[0] == "It came down from 2¹⁰ to 2⁷ by update 66, as it should."
    # From 128 three halvings are saved; the fourth skip was the price of a growth.
    assert search.advice == "Nothing; or start where it settled, `init_scale=128`, which saves 3 steps."
    assert later.title == "The backward overflowed (3 updates)"


def test_a_scale_that_came_down_late_is_no_search(folder: Folder) -> None:
    """A scale that has twice been raised from one place had settled there; a fall below belongs to the training."""
    saw = [128.0] * 10 + [256.0] * 3
    moves(folder, [256.0, *saw, *saw, *saw, 128.0, 64.0, *[32.0] * 40], 32.0)
    assert "from 2⁸ to 2⁷" in folder.told()[0].facts[0] + folder.told()[1].facts[0]


def test_skips_that_do_not_end_are_no_search(folder: Folder) -> None:
    """A scale that falls every ninth update has found no place, also where the first step was skipped."""
    folder.updates([BACKWARD] + ([None] * 8 + [BACKWARD]) * 5)
    ((weight, title),) = folder.findings()
    assert (weight, title) == ("look", 'The backward overflowed, in "a.module": a reason (6 updates)')


def test_a_search_ends_where_another_fault_halves_the_scale(folder: Folder) -> None:
    """What a loss that was not finite took from the scale is not where the scale belongs."""
    folder.updates([BACKWARD, None, BACKWARD, *[None] * 30, LOSS, *[None] * 30])
    (search,) = [finding for finding in folder.told() if finding.weight == "fine"]
    assert "`init_scale=256`" in search.advice


def test_a_rare_overflow_later_is_no_fault(folder: Folder) -> None:
    """One backward overflow in a hundred is the price of a scale that grows."""
    folder.updates([None] * 50 + [BACKWARD] + [None] * 50)
    assert folder.findings() == [("fine", 'The backward overflowed, in "a.module": a reason (1 update)')]


def test_frequent_overflows_deserve_a_look(folder: Folder) -> None:
    """More than one skip in twenty costs too much, though the scale helps each time."""
    folder.updates(([None] * 8 + [BACKWARD]) * 5)
    ((weight, title),) = folder.findings()
    assert (weight, title) == ("look", 'The backward overflowed, in "a.module": a reason (5 updates)')
    assert "At 5 of 45 updates (11.1 %), from 8 to 44." in folder.told()[0].facts


def test_skips_without_an_end_ask_for_action(folder: Folder) -> None:
    """Twenty-five in a row are no search: nothing is learnt any more, and since when is said."""
    folder.updates([None] * 10 + [BACKWARD] * 30)
    (finding,) = [finding for finding in folder.told() if finding.title.startswith("The backward")]
    assert finding.weight == "act"
    assert "The last 30 updates were all skipped: nothing was learnt since update 10." in finding.facts


@pytest.mark.parametrize("kind", [LOSS, STALE])
def test_what_no_scale_can_help_asks_for_action(folder: Folder, kind: str) -> None:
    """One loss that was not finite, one gradient that was never cleared: the cause, and its own advice."""
    folder.updates([None] * 50 + [kind] + [None] * 50)
    finding = folder.told()[0]
    assert finding.weight == "act"
    assert (finding.facts[-1], finding.advice) == (f"Seen: {kind}.", f"Advice about {kind}.")


def test_the_gravest_comes_first_and_then_the_most_frequent(folder: Folder) -> None:
    """Action before a look, a look before what is fine; among equals the one that cost more updates."""
    folder.updates([BACKWARD, None, LOSS, *([None] * 40), STALE, STALE, *([None] * 40)])
    weights, titles = zip(*folder.findings(), strict=True)
    assert weights == ("act", "act", "fine")
    assert titles[0].startswith("Gradients that were not finite were never cleared")
    assert folder.content().verdict.startswith("4 of 85 updates were skipped. Gradients that were")


def test_a_scale_below_one_is_told(folder: Folder) -> None:
    """A collapsed scale is named with its value."""
    folder.updates([BACKWARD] * 3 + [None] * 60, scale=4.0)
    (finding,) = [finding for finding in folder.told() if finding.title == "The scale fell to 2⁻¹"]
    assert finding.weight == "look"
    assert finding.advice.startswith("Take a mean instead of a sum in the loss")


@pytest.mark.parametrize("kind", [LOSS, STALE])
def test_a_collapse_that_follows_from_something_else_says_so(folder: Folder, kind: str) -> None:
    """Where no scale could help, the fall is a consequence: no sum in the loss is blamed, and the way back is told."""
    folder.updates([BACKWARD] * 2 + [kind] * 104, scale=4.0)
    _, fall = [finding for finding in folder.told() if finding.weight != "fine"]
    assert fall.title == "The scale fell to 2⁻¹⁰⁴"
    assert fall.facts == ("It fell 106 times, 104 of them at updates that no lower scale could help: told above.",)
    assert "mean" not in fall.advice
    assert [tile.value for tile in folder.content().tiles] == ["106", "106", "2⁻¹⁰⁴"]
    assert "`scaler.update(65536.0)`" in fall.advice and "2,000 updates" in fall.advice


def test_a_collapse_without_any_other_cause_is_told_in_one_word(folder: Folder) -> None:
    """Where every fall was beyond help, no share of them is counted; a scale that is not small keeps its digits."""
    folder.updates([LOSS] * 2, scale=1.0)
    fall = folder.told()[1]
    assert fall.facts == ("It fell 2 times, each time at updates that no lower scale could help: told above.",)
    assert [tile.value for tile in folder.content().tiles][-1] == "0.25"


def test_two_scalers_are_told_apart(folder: Folder) -> None:
    """With several scalers each finding and each picture says whose it is."""
    folder.updates([None] * 5)
    folder.updates([LOSS] + [None] * 5, number=1)
    content = folder.content(scalers=[SCALER, SCALER])
    assert [finding.title for finding in content.findings][1] == "No step of scaler 1 was skipped"
    assert content.findings[0].facts[0].startswith("At update 0 of 6 of scaler 2")
    assert [section.key for section in content.sections] == ["scale", "scale-2", "skips-2", "about"]


WITHOUT = {
    "none": ({"scalers": []}, "The script made no gradient scaler"),
    "off": ({"scalers": [{**SCALER, "enabled": False}]}, "The script's scaler was switched off"),
    "unmoved": ({}, "The scaler never moved"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_run_without_updates_is_explained(folder: Folder, name: str) -> None:
    """No scaler, a disabled one, one that nobody updates: three different things."""
    facts, title = WITHOUT[name]
    content = folder.content(**facts)
    assert content.findings[0].title == title
    assert content.findings[0].advice
    assert content.verdict == f"{title}."


ENDED = {
    "killed": ({"ending": None}, "The script has not come to its end"),
    "raised": ({"ending": "ValueError: no"}, "The script ended with ValueError"),
}


@pytest.mark.parametrize("name", ENDED)
def test_an_end_that_was_none_is_told(folder: Folder, name: str) -> None:
    """A run that was killed, or ended by an exception, says so."""
    facts, title = ENDED[name]
    folder.updates([None] * 3)
    assert folder.findings(**facts)[0] == ("look", title)


SILENT = {"float16 parameter": "A parameter is float16", "gradients exactly zero": "Gradients are exactly zero"}


@pytest.mark.parametrize(("kind", "title"), SILENT.items())
def test_what_is_wrong_without_a_skip_is_told(folder: Folder, kind: str, title: str) -> None:
    """What was wrong at the end, though nothing was skipped, asks for action."""
    folder.updates([None] * 3)
    Journal(folder.path / "causes.jsonl").append(3, {"without_skip": True, "causes": [cause(kind, ("head",))]})
    assert folder.findings()[0] == ("act", f'{title}, in "head"')


def sampled(folder: Folder, gradient: float, scale: float | None) -> None:
    """Sample a model whose gradients are all this large, multiplied by the scale."""
    model = nn.Linear(3, 2, bias=False)
    with watch(model, None, report=None) as watching:
        sampler = Sampler(1, folder.path / "ranges.json", print)
        sampler.add("model", watching)
        sampler.begin(0)
        (model(torch.ones(1, 3)) * gradient * (scale or 1.0)).sum().backward()
        assert sampler.end(0, scale) is not None


def test_a_scale_with_room_is_told(folder: Folder) -> None:
    """Gradients of 2⁻²⁴ at scale 2⁶ are subnormal in float16, and 2³⁶ would fit them with three bits to spare."""
    folder.updates([None] * 3, scale=64.0)
    sampled(folder, 2.0**-24, 64.0)
    finding = folder.told()[0]
    assert finding.weight == "look"
    assert finding.title.startswith("100 % of the gradients' elements are subnormal in float16")
    assert "up to 2³⁶" in finding.facts[0]
    assert f"init_scale={2.0**36:g}" in finding.advice


def test_a_sample_is_read_back_as_it_was_measured(folder: Folder) -> None:
    """Rows, scale and shares survive the file; the table has a row a gradient."""
    folder.updates([None] * 3)
    sampled(folder, 0.5, 1024.0)
    content = folder.content()
    (sample,) = read(folder.path).samples
    (row,) = sample.ranges.rows
    assert (row.name, row.largest, row.shape, sample.ranges.scale) == ("weight", 0.5, (2, 3), 1024.0)
    assert row.spread.bins == {9: (6, 0, 0)}
    table = next(section.table for section in content.sections if section.key == "ranges")
    assert table is not None
    cells = {column.title: cell for column, cell in zip(table.columns, table.rows[0], strict=True)}
    assert (cells["gradient"].words, cells["largest"].key, cells["elements"].key) == ("weight", 0.5, 6)
    # 65504 / 0.5 leaves 2¹⁶ (65504·2 = 131008 ≥ 2¹⁶), less three bits.
    assert cells["best scale"].key == 2.0**13


def test_a_run_without_a_scaler_is_asked_whether_float16_would_work(folder: Folder) -> None:
    """The gradients of a script that scales nothing are judged as they are."""
    sampled(folder, 2.0**-30, None)
    told = folder.told(scalers=[])
    assert [finding.title for finding in told] == [
        "The script made no gradient scaler",
        "What float16 would make of these gradients",
    ]
    assert "float16 would work here for these gradients, with a scale near" in told[1].facts[1]


def test_what_both_optimizers_tell_is_told_once_with_their_names(folder: Folder) -> None:
    """In the list of skips: the classes before what was seen, each sentence once; none where there is one."""
    folder.updates([LOSS, LOSS, LOSS])
    same, other = cause(LOSS), {**cause(LOSS), "sentences": ["Else.", "Advice."]}
    journal = Journal(folder.path / "causes.jsonl")
    journal.append(1, {"causes": [{**same, "optimizer": "SGD"}, {**same, "optimizer": "Adam"}]})
    journal.append(2, {"causes": [{**same, "optimizer": "SGD"}, {**other, "optimizer": "Adam", "rank": 1}]})
    journal.close()
    (table,) = [section.table for section in folder.content().sections if section.key == "skips"]
    assert table is not None
    assert [row[-1].words for row in table.rows] == [
        f"Seen: {LOSS}.",
        f"SGD, Adam: Seen: {LOSS}.",
        f"rank 0 SGD: Seen: {LOSS}. rank 1 Adam: Else.",
    ]


def test_the_summary_shows_every_fact_and_wraps_it(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """The last fact of a finding is often the best one; what is long goes on in the next line."""
    facts = tuple(f"This is the fact with the number {n} and a few more words." for n in range(9))
    report.sum_up(Content("t", "", "", findings=(Finding("act", "t", facts),)), folder.path)
    said = capsys.readouterr().err
    assert " ".join(facts) in " ".join(said.split())
    assert max(map(len, said.splitlines()[:-1])) <= 100


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    """A folder without a run, and a run file that is none, are refused by name."""
    with pytest.raises(Refusal, match=r"no run\.json"):
        read(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(Refusal, match=r"run\.json"):
            read(tmp_path)


def test_drawing_leaves_the_promised_files(folder: Folder) -> None:
    """``scale.png``, ``ranges.png`` and ``report.html``; nothing that was recorded is touched."""
    folder.updates([None, LOSS, None])
    sampled(folder, 0.5, 1024.0)
    folder.content()
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    report.draw(folder.path)
    after = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert set(after) - set(before) == {"scale.png", "ranges.png", "report.html"}
    assert {name: after[name] for name in before} == before
    assert after["scale.png"].startswith(b"\x89PNG")
    assert after["ranges.png"].startswith(b"\x89PNG")


def test_the_summary_has_three_findings_and_what_to_do(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, never on the script's output: the verdict, at most three findings, the report."""
    five = tuple(Finding("act", f"Title {n}", (f"Fact {n} about `x`.",), f"move {n}") for n in range(5))
    report.sum_up(Content("train.py", "", "A verdict.", findings=five), folder.path)
    out, err = capsys.readouterr()
    assert out == ""
    assert [f"Title {n}" in err for n in range(5)] == [True, True, True, False, False]
    assert "lucid-amp: train.py: A verdict." in err
    assert "Fact 0 about x." in err
    assert "→ move 2" in err
    assert str(folder.path / "report.html") in err


@pytest.mark.parametrize("stream", ["ascii", "closed", "none"])
def test_a_summary_is_said_to_whoever_can_hear_it(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal without our signs gets others for them; where there is none, nothing is said and nothing fails."""
    raw = io.BytesIO()
    terminal = None if stream == "none" else io.TextIOWrapper(raw, "ascii", write_through=True)
    if terminal and stream == "closed":
        terminal.close()
    monkeypatch.setattr("sys.stderr", terminal)
    report.say("→ 2¹⁶")
    if stream == "ascii":
        assert raw.getvalue() == b"? 2??\n"


def test_what_comes_from_outside_is_escaped(folder: Folder) -> None:
    """Names of scripts, modules and exceptions cannot break the page or bring a script into it."""
    evil = '<img src=x onerror="alert(1)">&'
    folder.facts.update(name=evil, command=[evil], ending=f"ValueError: {evil}", notes=[evil])
    folder.updates([LOSS])
    made = page(folder.content())
    assert "<img src=x" not in made
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;" in made


def test_code_in_a_text_is_shown_as_code() -> None:
    """Between backticks stands code, and nothing else becomes markup."""
    finding = Finding("fine", "t", ("call `a < b` now",))
    assert "call <code>a &lt; b</code> now" in page(Content("t", "", "", findings=(finding,)))


def test_the_page_needs_nothing_else(folder: Folder) -> None:
    """No address outside of the page: style, script and pictures are in it."""
    folder.updates([None, LOSS])
    made = page(folder.content())
    assert "http" not in made.replace("http-equiv", "")
    assert made.count("<style>") == made.count("<script>") == 1
    assert 'src="data:image/png;base64,' in made


@pytest.mark.parametrize(
    ("scale", "words"), [(65536.0, "2¹⁶"), (0.5, "2⁻¹"), (1.0, "2⁰"), (3.0, "3"), (0.0, "0"), (float("inf"), "inf")]
)
def test_a_scale_is_written_as_a_power_where_it_is_one(scale: float, words: str) -> None:
    """Powers of two by their exponent, others by their digits."""
    assert power(scale) == words


@pytest.mark.parametrize(("seconds", "words"), [(3.21, "3.2 s"), (75, "1 min 15 s"), (7260, "2 h 1 min")])
def test_a_time_span_is_written_in_two_units(seconds: float, words: str) -> None:
    """Hours and minutes, minutes and seconds, or seconds."""
    assert span(seconds) == words


def test_a_noun_follows_its_count() -> None:
    """One update, two updates, a thousand with a comma."""
    assert [plural(n, "update") for n in (1, 2, 1000)] == ["1 update", "2 updates", "1,000 updates"]


def test_a_table_of_many_rows_has_a_filter_and_a_small_one_has_none() -> None:
    """A filter comes where there is more than one screen of names."""
    columns = (Column("name", is_text=True), Column("number"))

    def made(rows: int) -> str:
        table = Table(columns, tuple((Cell(f"n{row}"), Cell("1", 1.0)) for row in range(rows)))
        return page(Content("t", "", "", sections=(Section("k", "K", table=table),)))

    assert "k-filter" in made(13)
    assert '<input id="k-filter"' not in made(12)
