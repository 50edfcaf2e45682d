"""Calls of PyTorch's clipping functions are heard, whoever calls them by whatever name; nothing of it stays."""

import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lucid.amp.cli.run._clipping import Call, Clipping

NAMES = ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_")


class Heard:
    """A block in which calls are heard, and what was heard."""

    def __init__(self, wanted: bool = True) -> None:
        self.calls: list[Call] = []
        self.clipping = Clipping(self.calls.append, lambda: wanted)


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Heard for one test."""
    heard = Heard()
    with heard.clipping:
        yield heard


def parameters() -> list[nn.Parameter]:
    """Two parameters, with gradients of 3 and 4."""
    made = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    made[0].grad, made[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    return made


def test_a_norm_is_heard_once_with_its_bound(heard: Heard) -> None:
    """3 and 4 have the norm 5; a call inside another one is not told by itself."""
    both = parameters()
    norm = torch.nn.utils.clip_grad_norm_(both, 1.0)
    (call,) = heard.calls
    assert (call.name, call.bound, norm.item()) == ("clip_grad_norm_", 1.0, 5.0)
    assert call.norm is norm
    assert [one is other for one, other in zip(call.parameters, both, strict=True)] == [True, True]
    assert both[0].grad is not None and both[0].grad.item() == pytest.approx(0.6)


def test_the_other_two_are_heard(heard: Heard) -> None:
    """A bound on each element has no norm, and a norm that is given is the one that is told."""
    both, given = parameters(), torch.tensor(10.0)
    torch.nn.utils.clip_grad_value_(both, clip_value=2.0)
    torch.nn.utils.clip_grads_with_norm_(both, max_norm=5.0, total_norm=given)
    assert [(call.name, call.bound) for call in heard.calls] == [(NAMES[2], 2.0), (NAMES[1], 5.0)]
    assert heard.calls[0].norm is None and heard.calls[1].norm is given


GIVEN: dict[str, Any] = {
    "list": lambda both: both,
    "tuple": tuple,
    "generator": lambda both: (one for one in both),
    "iterator": iter,
    "values": lambda both: dict(enumerate(both)).values(),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("by_name", [False, True])
def test_parameters_come_in_any_form(heard: Heard, given: Any, by_name: bool) -> None:
    """What can be read once is read once, by the function, and told all the same."""
    both = parameters()
    if by_name:
        norm = torch.nn.utils.clip_grad_norm_(parameters=given(both), max_norm=1.0)
    else:
        norm = torch.nn.utils.clip_grad_norm_(given(both), 1.0)
    assert norm.item() == 5.0
    assert [id(one) for one in heard.calls[0].parameters] == [id(one) for one in both]


def test_a_single_tensor_is_told(heard: Heard) -> None:
    """One parameter by itself is a list of one."""
    one = parameters()[0]
    torch.nn.utils.clip_grad_norm_(one, 1.0)
    assert [id(each) for each in heard.calls[0].parameters] == [id(one)]


def test_an_empty_generator_is_warned_of_as_ever(heard: Heard) -> None:
    """The function still sees a generator, and says that it was empty."""
    with pytest.warns(UserWarning, match="empty generator"):
        torch.nn.utils.clip_grad_norm_((one for one in ()), 1.0)


def test_what_was_imported_by_name_before_is_heard(heard: Heard) -> None:
    """This module took the function by name when it was loaded."""
    clip_grad_norm_(parameters(), 1.0)
    assert [call.name for call in heard.calls] == ["clip_grad_norm_"]


def test_the_deprecated_name_is_heard(heard: Heard) -> None:
    """``clip_grad_norm`` calls the other one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.clip_grad_norm(parameters(), 1.0)
    assert [call.name for call in heard.calls] == ["clip_grad_norm_"]


def test_nothing_is_told_that_is_not_wanted() -> None:
    """Where nobody wants to hear, the function is called as it is."""
    heard = Heard(wanted=False)
    with heard.clipping:
        assert torch.nn.utils.clip_grad_norm_(iter(parameters()), 1.0).item() == 5.0
    assert heard.calls == []


def test_an_exception_passes_and_the_next_call_is_heard(heard: Heard) -> None:
    """What the function raises reaches the caller; nothing is told of that call."""
    both = parameters()
    both[0].grad = torch.tensor([torch.nan])
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(both, 1.0, error_if_nonfinite=True)
    assert heard.calls == []
    torch.nn.utils.clip_grad_norm_(parameters(), 1.0)
    assert len(heard.calls) == 1


def test_a_compiled_function_is_traced_whole(heard: Heard) -> None:
    """Clipping inside a compiled function is neither heard nor in the way."""
    (one, _) = parameters()

    @torch.compile(backend="eager", fullgraph=True)
    def clip(x: torch.Tensor) -> torch.Tensor:
        torch.nn.utils.clip_grad_norm_([one], 1.0)
        return x + 1

    assert clip(torch.zeros(1)).item() == 1.0
    assert heard.calls == []


def places() -> dict[str, list[str]]:
    """Which names of which modules hold PyTorch's own functions."""
    own = {id(getattr(torch.nn.utils, name)) for name in NAMES}
    modules = [(key, module) for key, module in sys.modules.items() if isinstance(module, types.ModuleType)]
    return {key: names for key, module in modules if (names := [n for n, v in vars(module).items() if id(v) in own])}


def test_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the block every module has PyTorch's functions, also one that was loaded meanwhile, and after an error."""
    before = places()
    assert "torch.nn.utils.clip_grad" in before and __name__ in before
    late = types.ModuleType("loaded_late")
    monkeypatch.setitem(sys.modules, "loaded_late", late)
    with pytest.raises(KeyError), Heard().clipping:
        exec("from torch.nn.utils import clip_grad_norm_ as mine", vars(late))
        assert places()["loaded_late"] == ["mine"]
        assert vars(late)["mine"] is not before
        raise KeyError
    assert places() == {**before, "loaded_late": ["mine"]}
    assert vars(late)["mine"] is clip_grad_norm_
    assert vars(torch.nn.utils.clip_grad)["clip_grad_norm_"] is clip_grad_norm_
    # The original's code is PyTorch's file, a stand-in's would be ours.
    assert "lucid" not in clip_grad_norm_.__code__.co_filename
