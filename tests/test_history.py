"""The record of a run: collected from any scaler, bounded, kept in a file, read back, logged and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lucid.amp import GradScaler
from lucid.amp._schedule import ScaleUpdate
from lucid.amp.diagnosis import watch
from lucid.amp.history import History, Record
from lucid.amp.history._picture import LOOKS

BACKWARD, LOSS, STALE = "backward overflowed", "loss not finite", "gradients never cleared"

SCALERS = {
    "lucid": GradScaler,
    "torch": lambda *numbers: torch.amp.GradScaler("cpu", *numbers),
}


@pytest.fixture(params=SCALERS)
def make(request: pytest.FixtureRequest) -> Any:
    """What makes a scaler: lucid's and PyTorch's in turn."""
    return SCALERS[request.param]


def train(scaler: Any, gradients: list[float]) -> None:
    """One update for each of these (unscaled) gradients of a single weight."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale(weight * gradient).sum().backward()
        scaler.step(optimizer)
        scaler.update()


def updates(count: int) -> list[ScaleUpdate]:
    """Overflow-free updates at scale 8."""
    return [ScaleUpdate(index, 8.0, 8.0, False, (False,)) for index in range(count)]


def test_each_update_is_recorded(make: Any) -> None:
    """Scale before and after, overflow and skip of every update, whichever scaler it is."""
    scaler = make(1024.0, 2.0, 0.5, 2)
    history = History(scaler)
    train(scaler, [1.0, 1.0, float("inf"), 1.0])
    rows = [(r.step, r.scale, r.new_scale, r.overflow, r.skipped) for r in history]
    assert rows == [
        (0, 1024.0, 1024.0, False, (False,)),
        (1, 1024.0, 2048.0, False, (False,)),
        (2, 2048.0, 1024.0, True, (True,)),
        (3, 1024.0, 1024.0, False, (False,)),
    ]


@pytest.mark.parametrize(("loss", "kind"), [(1e5, BACKWARD), (float("nan"), LOSS)])
def test_a_skip_is_recorded_with_its_cause(make: Any, loss: float, kind: str) -> None:
    """Where the model is watched, the record says why a step was skipped and where that began."""
    model, scaler = nn.Sequential(nn.Linear(1, 1)), make(2.0**120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, scaler, report=None), History(scaler) as history:
        scaler.scale((model(torch.full((1, 1), loss)) ** 3).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [(record.kind, record.where) for record in history] == [(kind, ("0",))]


def test_nothing_is_recorded_after_close(make: Any) -> None:
    """A closed history keeps what it has and hears nothing more; a block closes it."""
    scaler = make()
    with History(scaler) as history:
        train(scaler, [1.0])
    train(scaler, [1.0, 1.0])
    assert len(history) == 1
    history.close()


def test_a_disabled_scaler_has_an_empty_history(make: Any) -> None:
    """A scaler that does not scale has no update to record."""
    scaler = make(1024.0, 2.0, 0.5, 2, False)
    with History(scaler) as history:
        train(scaler, [1.0])
    assert list(history) == []


def test_no_scaler_is_refused() -> None:
    """Anything else than a scaler is refused by its type's name."""
    with pytest.raises(TypeError, match="Linear"):
        History(nn.Linear(1, 1))


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_capacity_below_one_is_refused(capacity: int) -> None:
    """A buffer must hold something."""
    with pytest.raises(ValueError, match=f"capacity must be at least 1.*got {capacity}"):
        History(capacity=capacity)


def test_memory_is_bounded_and_the_file_is_not(tmp_path: Path) -> None:
    """The buffer keeps the newest, the file all; a read may be bounded as well."""
    history = History(path=tmp_path / "h.jsonl", capacity=3)
    for update in updates(10):
        history.add(update)
    history.close()
    assert [record.step for record in history] == [7, 8, 9]
    assert [record.step for record in History.read(tmp_path / "h.jsonl")] == list(range(10))
    assert [record.step for record in History.read(tmp_path / "h.jsonl", capacity=2)] == [8, 9]


def test_what_was_recorded_is_read_back_equal(tmp_path: Path) -> None:
    """Every field of every record survives the file."""
    history = History(path=tmp_path / "h.jsonl")
    history.sample(zero=12.5, subnormal=0.25)
    history.add(ScaleUpdate(0, 2.0, 1.0, True, (True, False)), kind="backward", where=["head.weight"])
    history.add(ScaleUpdate(1, 1.0, float("inf"), False, ()))
    history.close()
    read = History.read(tmp_path / "h.jsonl")
    assert read[0] == Record(0, 2.0, 1.0, True, (True, False), "backward", ("head.weight",), 12.5, 0.25)
    assert read[:] == history[:]
    assert read[1].zero is None, "a sample belongs to one record"


def test_each_line_is_an_object_that_anybody_can_read(tmp_path: Path) -> None:
    """The file is JSON lines with the records' own names; what is not known is left out."""
    history = History(path=tmp_path / "h.jsonl")
    history.add(ScaleUpdate(0, 8.0, 4.0, True, (True,)), kind="loss")
    history.close()
    (line,) = (tmp_path / "h.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 0, "scale": 8.0, "new_scale": 4.0, "overflow": True, "skipped": [True], "kind": "loss",
    }  # fmt: skip


def test_keys_of_a_later_version_are_left_out() -> None:
    """A record with a key that is not known here is still read."""
    record = Record.from_dict({"step": 3, "scale": 8.0, "new_scale": 8.0, "mood": "good"})
    assert record == Record(3, 8.0, 8.0)


def test_a_history_goes_on_in_its_file(make: Any, tmp_path: Path) -> None:
    """A second process finds the first one's records, and its own follow them."""
    for _ in range(2):
        scaler = make(1024.0)
        with History(scaler, tmp_path / "h.jsonl") as history:
            train(scaler, [1.0, float("nan")])
    assert [(r.step, r.scale) for r in history] == [(0, 1024.0), (1, 1024.0), (2, 1024.0), (3, 1024.0)]
    assert History.read(tmp_path / "h.jsonl")[:] == history[:]


def test_cut_at_every_byte_the_history_reads_and_goes_on(tmp_path: Path) -> None:
    """A kill at any byte loses at most the record that was being written."""
    path = tmp_path / "h.jsonl"
    history = History(path=path)
    for update in updates(3):
        history.add(update)
    history.close()
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = sum(end <= length for end in ends)
        assert len(History.read(path)) == kept, length
        history = History(path=path)
        assert history.add(updates(1)[0]).step == kept, length
        history.close()


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    """A path that holds something else is refused."""
    (tmp_path / "notes.txt").write_text("dear diary\n")
    with pytest.raises(ValueError, match="is no history"):
        History(path=tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError):
        History.read(tmp_path / "none.jsonl")


class Writer:
    """Stands for a TensorBoard SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Keep what a writer would write."""
        self.scalars.append((tag, value, step))


def test_a_summary_writer_gets_scalars_at_their_steps(make: Any) -> None:
    """One line attaches a SummaryWriter; from then on it gets each update."""
    scaler, writer = make(1024.0), Writer()
    history = History(scaler)
    train(scaler, [1.0])
    history.log_to(writer)
    history.sample(zero=50.0, subnormal=25.0)
    train(scaler, [float("inf")])
    assert writer.scalars == [
        ("amp/scale", 1024.0, 1),
        ("amp/overflow", 1.0, 1),
        ("amp/skipped", 1.0, 1),
        ("amp/zero_percent", 50.0, 1),
        ("amp/subnormal_percent", 25.0, 1),
    ]


def test_any_callable_gets_dicts() -> None:
    """A function that takes a dict gets one for each update, its step among the rest."""
    history, got = History(), []
    history.log_to(got.append)
    history.add(ScaleUpdate(0, 4.0, 8.0, False, (False, False)))
    assert got == [{"amp/step": 0, "amp/scale": 4.0, "amp/overflow": 0.0, "amp/skipped": 0.0}]


def test_a_history_that_was_read_is_logged_whole(tmp_path: Path) -> None:
    """One line sends a file that exists to a logger."""
    with History(path=tmp_path / "h.jsonl") as history:
        for update in updates(4):
            history.add(update)
    writer = Writer()
    History.read(tmp_path / "h.jsonl").log_to(writer)
    assert [step for tag, _, step in writer.scalars if tag == "amp/scale"] == [0, 1, 2, 3]


def test_what_is_no_logger_is_refused() -> None:
    """A target that can take nothing is refused by its type's name."""
    with pytest.raises(TypeError, match="was given a int"):
        History().log_to(3)


def saw() -> History:
    """A history with a skip of each kind and some samples."""
    history = History()
    for step in range(40):
        kind = {5: BACKWARD, 11: LOSS, 12: LOSS, 20: STALE, 30: None}.get(step, "")
        if step % 10 == 0:
            history.sample(zero=float(step), subnormal=3.0)
        scale = 2.0 ** (16 - step // 10)
        history.add(ScaleUpdate(step, scale, scale, kind != "", (kind != "",)), kind=kind or None)
    return history


def test_the_picture_marks_each_kind_of_skip_where_it_was() -> None:
    """Every overflow is marked at its step and scale, each kind in one series with its count."""
    top = saw().plot().axes[0]
    marked = {line.get_label(): line.get_xydata().tolist() for line in top.lines}
    words = {kind: f"skipped: {look.words}" for kind, look in LOOKS.items()}
    assert marked[f"{words[LOSS]} (2×)"] == [[11, 2.0**15], [12, 2.0**15]]
    assert marked[f"{words[BACKWARD]} (1×)"] == [[5, 2.0**16]]
    assert marked[f"{words[STALE]} (1×)"] == [[20, 2.0**14]]
    assert marked[f"{words[None]} (1×)"] == [[30, 2.0**13]]
    assert top.get_yscale() == "log"


def test_the_picture_shows_the_samples_below() -> None:
    """Percent zero and percent subnormal are drawn below, at the steps where they were sampled."""
    below = saw().plot().axes[1]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in below.lines}
    assert drawn["exactly zero"] == [[0, 0], [10, 10], [20, 20], [30, 30]]
    assert drawn["subnormal in float16"] == [[0, 3], [10, 3], [20, 3], [30, 3]]


def test_no_two_marks_look_alike_in_black_and_white() -> None:
    """Each kind has a shape of its own, and each line a style of its own."""
    assert len({look.shape for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.colour for look in LOOKS.values()}) == len(LOOKS)
    below = saw().plot().axes[1]
    assert len({(line.get_linestyle(), line.get_marker()) for line in below.lines}) == 2


def test_the_line_bends_where_the_scale_changes() -> None:
    """A long row at one scale is drawn by its ends, so that a million updates cost nothing."""
    history = History(capacity=None)
    for step in range(5000):
        history.add(ScaleUpdate(step, 8.0 if step < 3000 else 16.0, 16.0, False, (False,)))
    line = history.plot().axes[0].lines[0]
    assert line.get_xydata().tolist() == [[0, 8.0], [3000, 16.0], [5000, 16.0]]


@pytest.mark.parametrize("scales", [[], [65536.0], [0.0, 0.0], [float("inf"), 2.0]])
def test_odd_histories_are_drawn(scales: list[float], tmp_path: Path) -> None:
    """None, one, or only useless scales still make a picture, in the format of the path's ending."""
    history = History()
    for step, scale in enumerate(scales):
        history.add(ScaleUpdate(step, scale, scale, True, (True,)), kind="of tomorrow")
    history.plot(tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    """The picture uses no global figure, so that a training script's own plots are not touched."""
    import matplotlib

    settings = dict(matplotlib.rcParams)
    saw().plot()
    assert dict(matplotlib.rcParams) == settings


def test_repr_says_what_matters() -> None:
    """How many updates, how many overflows, the scale now."""
    assert repr(saw()) == "History(40 updates, 5 with an overflow, scale 8192)"
    assert repr(History()) == "History(0 updates, 0 with an overflow)"
