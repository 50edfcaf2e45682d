"""What a script makes is noticed: every scaler as it is made, every model before its first call; nothing stays."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

from lucid.amp import GradScaler
from lucid.amp.cli.run._notice import Notice


class Seen:
    """A notice, and what it heard."""

    def __init__(self, models: bool = True) -> None:
        self.scalers: list[Any] = []
        self.models: list[nn.Module] = []
        self.notice = Notice(self.scalers.append, self.models.append if models else None)


@pytest.fixture
def seen() -> Any:
    """A notice that is in force for one test."""
    seen = Seen()
    with seen.notice:
        yield seen


class Own(torch.amp.GradScaler):
    """A script's own scaler."""

    def __init__(self) -> None:
        super().__init__("cpu")


MAKERS = {
    "lucid": GradScaler,
    "torch.amp": lambda: torch.amp.GradScaler("cpu"),
    "torch": lambda: torch.GradScaler("cpu", enabled=False),
    "own": Own,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_scaler_is_noticed_once_whoever_made_it(seen: Seen, make: Any) -> None:
    """Constructed, unpickled or copied, each scaler is told of once."""
    first = make()
    second = pickle.loads(pickle.dumps(first))
    third = copy.deepcopy(first)
    assert [any(one is other for other in seen.scalers) for one in (first, second, third)] == [True] * 3
    assert len(seen.scalers) == 3


def test_the_outermost_module_is_noticed_once(seen: Seen) -> None:
    """A model is told of at its first call, before it runs; what it calls inside is not."""
    order: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    seen.notice.on_model = lambda module: (order.append("noticed"), seen.models.append(module))
    model[0].register_forward_pre_hook(lambda *_: order.append("ran"))
    for _ in range(2):
        model(torch.ones(1, 2))
    assert order == ["noticed", "ran", "ran"]
    assert seen.models == [model]


def test_a_part_that_is_called_by_itself_is_a_model(seen: Seen) -> None:
    """A script that calls parts of a container, and never the container, trains those parts."""
    parts = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    parts["b"](parts["a"](torch.ones(1, 2)))
    assert seen.models == [parts["a"], parts["b"]]


def test_what_is_not_trained_is_no_model(seen: Seen) -> None:
    """A loss without parameters, an evaluation without gradients, another thread: none is told of."""
    nn.MSELoss()(torch.ones(1), torch.ones(1))
    with torch.no_grad():
        nn.Linear(2, 2)(torch.ones(1, 2))
    thread = threading.Thread(target=nn.Linear(2, 2), args=(torch.ones(1, 2),))
    thread.start()
    thread.join()
    assert seen.models == []


def test_the_module_inside_a_wrapper_is_noticed(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DataParallel` is not the model: what it was given is, once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else DataParallel wants its module on the GPU
    inside = nn.Linear(2, 2)
    inside(torch.ones(1, 2))
    nn.DataParallel(inside)(torch.ones(1, 2))
    other = nn.Linear(2, 2)
    nn.DataParallel(other)(torch.ones(1, 2))
    assert seen.models == [inside, other]


def test_a_call_that_raises_leaves_the_next_one_noticed(seen: Seen) -> None:
    """An exception in a forward passes through, and the next model is told of."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nn.Linear(2, 2)(torch.ones(1, 3))
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2))
    assert seen.models[1:] == [model]


class Alike(nn.Linear):
    """Equal to everything, and of one hash."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


def test_models_are_told_apart_by_identity(seen: Seen) -> None:
    """A class whose objects are all equal has each of them noticed."""
    first, second = Alike(2, 2), Alike(2, 2)
    for model in (first, second):
        model(torch.ones(1, 2))
    assert [one is other for one, other in zip(seen.models, (first, second), strict=True)] == [True, True]


def test_a_compiled_step_is_traced_whole(seen: Seen) -> None:
    """A model inside a compiled function is neither noticed nor in the way: `fullgraph=True` holds."""
    model = nn.Linear(2, 2)
    step = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    assert torch.equal(step(x), torch.nn.functional.linear(x, model.weight, model.bias).sum())
    assert seen.models == []


def test_nothing_of_it_stays() -> None:
    """After the block PyTorch's and lucid's classes are what they were, also after an exception."""
    before = [vars(owner).get(name) for owner, name in DOORS]
    with pytest.raises(KeyError), Seen().notice:
        assert [vars(owner).get(name) for owner, name in DOORS] != before
        raise KeyError
    assert [vars(owner).get(name) for owner, name in DOORS] == before


DOORS = [
    (torch.amp.GradScaler, "__init__"),
    (torch.amp.GradScaler, "__setstate__"),
    (GradScaler, "__init__"),
    (GradScaler, "__setstate__"),
    (nn.Module, "__call__"),
]


def test_modules_are_left_alone_on_demand() -> None:
    """Without `on_model` no module's call goes through us."""
    before = vars(nn.Module)["__call__"]
    with Seen(models=False).notice:
        assert vars(nn.Module)["__call__"] is before
