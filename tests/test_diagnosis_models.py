"""What is told of a module from outside: names, wrappers, sizes, and why its forward must not be run again."""

import pytest
import torch
from torch import nn

from lucid.amp.diagnosis import _models
from lucid.amp.diagnosis._trees import tensors_in, with_tensors


def test_names_are_those_of_the_model_without_wrappers() -> None:
    """Parameters of a compiled submodule have the names they had before it was compiled."""
    inner = nn.Sequential(nn.Linear(1, 1))
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(1, 1, bias=False))
    assert list(_models.names(model).values()) == ["0.0.weight", "0.0.bias", "1.weight"]
    assert _models.names(model)[id(inner[0].weight)] == "0.0.weight"
    assert list(_models.module_names(model).values()) == ["", "0", "0.0", "1"]


def test_all_wrappers_are_taken_off() -> None:
    """Compiled around parallel around compiled is the module itself."""
    model = nn.Linear(1, 1)
    assert (
        _models.unwrapped(torch.compile(nn.DataParallel(torch.compile(model, backend="eager")), backend="eager"))
        is model
    )
    assert _models.unwrapped(model) is model


def test_a_shared_parameter_has_its_first_name() -> None:
    """Tied weights are named once."""
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    model["b"].weight = model["a"].weight
    assert list(_models.names(model).values()) == ["a.weight"]


def test_the_largest_weights() -> None:
    """Each floating-point parameter that holds something, by its largest magnitude."""
    model = nn.Module()
    model.a = nn.Parameter(torch.tensor([1.0, -3.0]))
    model.b = nn.Parameter(torch.zeros(0))
    model.c = nn.Parameter(torch.tensor([7]), requires_grad=False)
    model.d = nn.LazyLinear(2)
    assert [(weight.name, weight.largest.item()) for weight in _models.largest_weights(model)] == [("a", 3.0)]


def test_parameters_that_are_trained_in_float16() -> None:
    """A frozen half parameter is no fault."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).half(), nn.Linear(1, 1).half().requires_grad_(False))
    assert _models.half_parameters(model) == ["1.weight", "1.bias"]


def test_gradients_that_are_zero_throughout() -> None:
    """Each parameter with a gradient is told, whether that holds anything but zeros."""
    model = nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[0.0, 0.0]])
    assert [(name, zero.item()) for name, zero in _models.zero_gradients(model)] == [("weight", True)]
    model.weight.grad[0, 1] = 1e-30
    assert [(name, zero.item()) for name, zero in _models.zero_gradients(model)] == [("weight", False)]


def test_why_a_forward_must_not_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would wait for other ranks, or could not be put back; alone, a synchronised normalisation may."""
    model = nn.Sequential(nn.SyncBatchNorm(2))
    assert _models.replay_refusal(model) is None
    monkeypatch.setattr(_models, "ranks", lambda: 2)
    assert _models.replay_refusal(model) == "SyncBatchNorm would wait for the other ranks"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # TorchScript itself is deprecated
def test_torchscript_is_not_run_again() -> None:
    """What it changes in itself is out of reach."""
    model = nn.Sequential(torch.jit.script(nn.Linear(1, 1)))
    assert "TorchScript" in str(_models.replay_refusal(model))


def test_alone_this_is_rank_0_of_1() -> None:
    """Without a process group there is one process, and a path is itself."""
    assert (_models.rank(), _models.ranks()) == (0, 1)
    assert str(_models.path_of_rank("batch.pt")) == "batch.pt"


def test_another_rank_s_path_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do not overwrite each other's files."""
    monkeypatch.setattr(_models, "rank", lambda: 3)
    assert str(_models.path_of_rank("batch.pt")) == "batch.rank3.pt"


def test_a_signature_tells_models_apart() -> None:
    """Same names and class, same text; another name, another text."""
    assert _models.signature(nn.Linear(1, 1)) == _models.signature(nn.Linear(9, 9))
    assert _models.signature(nn.Linear(1, 1)) != _models.signature(nn.Linear(1, 1, bias=False))


def test_tensors_inside_anything() -> None:
    """Lists, tuples, dicts, other mappings and dataclasses are looked into, in order; the rest holds none."""
    from collections import UserDict
    from dataclasses import dataclass

    @dataclass
    class Pair:
        left: object
        right: object

    a, b, c, d, e = (torch.tensor(float(number)) for number in range(5))
    value = [a, (b, {"k": c}), UserDict(x=d), Pair(e, "text"), 3, None]
    assert [tensor.item() for tensor in tensors_in(value)] == [0, 1, 2, 3, 4]


def test_tensors_are_replaced_in_plain_containers() -> None:
    """Lists, tuples, namedtuples and dicts keep their types; other containers stay as they are."""
    from collections import UserDict, namedtuple

    point = namedtuple("point", "x y")
    other = UserDict(x=torch.ones(()))
    changed = with_tensors([point(torch.ones(()), 1), {"k": (torch.ones(()),)}, other], lambda tensor: tensor * 2)
    assert changed[0] == point(torch.tensor(2.0), 1) and type(changed[0]) is point
    assert changed[1]["k"][0].item() == 2.0 and changed[2] is other
