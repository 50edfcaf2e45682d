"""Checkpoints: between lucid's scaler and PyTorch's, through JSON and ``torch.load``, all of it or nothing."""

import io
import json
import math
from typing import Any

import pytest
import torch

from lucid.amp import GradScaler

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def aged() -> GradScaler:
    """A scaler with no default left, and a count."""
    scaler = GradScaler(1000.0, 4.0, 0.25, 7)
    scaler.update()
    scaler.update()
    return scaler


def torch_scaler(*settings: Any, enabled: bool = True) -> torch.amp.GradScaler:
    """PyTorch's scaler with these settings, and a count of 2."""
    scaler = torch.amp.GradScaler("cpu", *settings, enabled=enabled)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def json_trip(state: Any) -> Any:
    """The state as JSON brings it back."""
    return json.loads(json.dumps(state))


def torch_trip(state: Any) -> Any:
    """The state as torch.load(weights_only=True) brings it back."""
    buffer = io.BytesIO()
    torch.save({"scaler": state}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["scaler"]


def test_the_five_keys_hold_plain_numbers() -> None:
    """PyTorch's names, Python's floats and ints, no bool and no tensor."""
    state = aged().state_dict()
    assert list(state) == KEYS
    assert state == dict(zip(KEYS, [1000.0, 4.0, 0.25, 7, 2], strict=True))
    assert [type(value) for value in state.values()] == [float, float, float, int, int]


def test_the_state_is_a_copy() -> None:
    """What is done to it later does not reach the scaler."""
    scaler = aged()
    scaler.state_dict()["scale"] = 1.0
    assert scaler.get_scale() == 1000.0


@pytest.mark.parametrize("trip", [lambda state: state, json_trip, torch_trip], ids=["plain", "json", "torch.load"])
def test_a_scaler_resumes(trip: Any) -> None:
    """Scale, settings and count come back, so that it grows at the update at which the first one would."""
    first, second = aged(), GradScaler()
    second.load_state_dict(trip(first.state_dict()))
    assert second.state_dict() == first.state_dict()
    for _ in range(5):
        second.update()
    assert second.get_scale() == 4000.0


@pytest.mark.parametrize("trip", [lambda state: state, json_trip, torch_trip], ids=["plain", "json", "torch.load"])
def test_a_checkpoint_goes_to_pytorch_and_back(trip: Any) -> None:
    """In both directions, with nothing lost; both then move alike."""
    theirs = torch_scaler(1000.0, 4.0, 0.25, 7)
    ours = GradScaler()
    ours.load_state_dict(trip(theirs.state_dict()))
    assert ours.state_dict() == theirs.state_dict() == aged().state_dict()
    back = torch_scaler()
    back.load_state_dict(trip(ours.state_dict()))
    assert back.state_dict() == theirs.state_dict()


def test_whole_floats_of_json_are_counts() -> None:
    """An interval of 2000.0 is 2000."""
    scaler = GradScaler()
    scaler.load_state_dict({**aged().state_dict(), "growth_interval": 2000.0, "_growth_tracker": 3.0})
    assert scaler.get_growth_interval() == 2000
    assert scaler.state_dict()["_growth_tracker"] == 3


def test_the_other_name_of_the_count_is_read() -> None:
    """growth_tracker without the underscore."""
    state = {key.lstrip("_"): value for key, value in aged().state_dict().items()}
    scaler = GradScaler()
    scaler.load_state_dict(state)
    assert scaler.state_dict() == aged().state_dict()


def test_a_loaded_scale_is_rounded_to_float32() -> None:
    """As every scale that is set."""
    scaler = GradScaler()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 0.1})
    assert scaler.get_scale() == torch.tensor(0.1).item()


WRONG: list[tuple[Any, type[Exception], str]] = [
    *[({"scale": value}, ValueError, "scale") for value in (0, 0.0, -4.0, math.nan, math.inf, 2.0**-140)],
    *[({"scale": value}, TypeError, "scale") for value in ("8", None, True, [8.0], torch.ones(1))],
    ({"growth_factor": 1.0}, ValueError, "growth_factor"),
    ({"growth_factor": math.inf}, ValueError, "growth_factor"),
    ({"backoff_factor": 0.0}, ValueError, "backoff_factor"),
    ({"backoff_factor": "0.5"}, TypeError, "backoff_factor"),
    ({"growth_interval": 0}, ValueError, "growth_interval"),
    ({"growth_interval": 3.5}, TypeError, "growth_interval"),
    ({"_growth_tracker": -1}, ValueError, "growth_tracker"),
    ({"_growth_tracker": None}, TypeError, "growth_tracker"),
    ({"hysteresis": 2}, ValueError, "'hysteresis'"),
    ({3: 2}, ValueError, "unknown keys: 3"),
    *[({key: ...}, ValueError, key.lstrip("_")) for key in KEYS],
]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("change", "error", "named"), WRONG, ids=lambda value: str(value)[:40])
def test_a_bad_state_is_refused_by_name_and_nothing_is_loaded(
    change: dict[Any, Any], error: type[Exception], named: str, enabled: bool
) -> None:
    """A missing key (here ...), an unknown one or a bad value: the scaler is as it was before, its settings too."""
    scaler = GradScaler(1000.0, 4.0, 0.25, 7, enabled)
    before = scaler.state_dict()
    state = {"scale": 2.0, "growth_factor": 3.0, "backoff_factor": 0.75, "growth_interval": 9, "_growth_tracker": 5}
    state = {key: value for key, value in {**state, **change}.items() if value is not ...}
    with pytest.raises(error, match=named):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("state", [None, [], "state", [("scale", 1.0)]], ids=repr)
def test_what_is_no_dict_is_refused(state: Any) -> None:
    """With the type that was found."""
    with pytest.raises(TypeError, match=type(state).__name__):
        GradScaler().load_state_dict(state)


def test_the_empty_state_of_a_disabled_scaler_is_refused_with_the_reason() -> None:
    """An enabled scaler cannot start from nothing, and says where {} comes from."""
    state = torch_scaler(enabled=False).state_dict()
    assert state == {}
    scaler = aged()
    with pytest.raises(RuntimeError, match="disabled"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == aged().state_dict()


def test_loading_in_the_middle_of_an_iteration_moves_no_stage() -> None:
    """What is divided stays divided: the step lands with the gradient that unscale_ left."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler(4.0)
    weight.grad = torch.full((2,), 12.0)
    scaler.unscale_(optimizer)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    with pytest.raises(RuntimeError, match="already ran"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.tolist() == [-3.0] * 2
    assert scaler.get_scale() == 2.0


def test_a_backward_that_is_due_survives_the_loading_of_its_own_scale() -> None:
    """Nothing is written where nothing changes, which autograd would take for a change: d(p²)/dp · 4 = 24."""
    scaler, weight = GradScaler(4.0), torch.nn.Parameter(torch.tensor(3.0))
    loss = scaler.scale(weight * weight)
    scaler.load_state_dict(scaler.state_dict())
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 24.0
