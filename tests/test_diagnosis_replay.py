"""Where values stop being finite in a forward that is run again.

Each model has one place that breaks; the tests know it. Nothing here knows of scalers.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lucid.amp.diagnosis._extents import Extent, extent_of
from lucid.amp.diagnosis._replay import Replay, fingerprint, replay
from lucid.amp.diagnosis._snapshot import Surroundings


class Does(nn.Module):
    """Calls its submodules in turn, then a function."""

    def __init__(self, function: Callable[..., Any] = lambda x: x, *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.modules_ = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        """Return function(submodules(x))."""
        for module in self.modules_:
            x = module(x)
        return self.function(x)


def again(model: nn.Module, x: Tensor, half: bool = False) -> Replay:
    """A replay of ``model(x)``, under float16 autocast or in float32."""
    with torch.autocast("cpu", torch.float16, enabled=half):
        surroundings = Surroundings([torch.device("cpu")])
    return replay(model, ((x,), {}), surroundings)


def test_nothing_is_found_where_all_is_finite() -> None:
    """A sound forward has no origin; modules are listed in the order in which they finish."""
    seen = again(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), torch.ones(1, 2))
    assert (seen.origin, seen.error) == (None, None)
    assert seen.order == ["0", "1.0", "1", ""]


def test_the_first_of_many_that_are_not_finite() -> None:
    """The first module that made it so is named, not those that handed it on."""
    model = nn.Sequential(nn.ReLU(), Does(lambda x: x / 0), nn.Linear(2, 2), nn.ReLU())
    origin = again(model, torch.ones(1, 2)).origin
    assert origin is not None
    assert (origin.module, origin.type, origin.inside) == ("1", "Does", True)
    assert origin.output == Extent(2, 0, 2, 0, 0.0, False)


def test_execution_order_is_not_the_order_of_registration() -> None:
    """What runs first is first, wherever it was registered."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = Does(lambda x: x * math.inf)
            self.early = Does(lambda x: x / 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early(x))

    origin = again(Backwards(), torch.ones(2)).origin
    assert origin is not None and origin.module == "early"


def test_the_numbers_of_the_place() -> None:
    """Largest input, weight and finite output of the module, and the output as float32 would have had it."""
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2, bias=False))
    model[1].weight.data = torch.tensor([[200.0, 0.0], [1.0, -100.0]])
    origin = again(model, torch.tensor([[400.0, 8.0]]), half=True).origin
    assert origin is not None and origin.output is not None
    assert (origin.inputs.largest, origin.weight.largest) == (400.0, 200.0)
    assert (origin.output.inf, origin.output.largest) == (1, 400.0)  # 400·200 is beyond; 400 − 800 is −400
    assert origin.in_float32 == 80000.0


def test_a_formula_that_no_precision_helps() -> None:
    """A division by zero is not finite in float32 either."""
    origin = again(nn.Sequential(Does(lambda x: (x - x) / (x - x))), torch.ones(2), half=True).origin
    assert origin is not None and origin.in_float32 is not None and math.isnan(origin.in_float32)


def test_code_between_two_modules() -> None:
    """Where a module's own code breaks the values before it calls a submodule, both are named."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.ReLU(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) / 0)

    origin = again(nn.Sequential(Between()), torch.ones(2)).origin
    assert origin is not None
    assert (origin.module, origin.before, origin.inside) == ("0", "0.second", True)


def test_a_batch_that_was_not_finite() -> None:
    """The batch is told, and the first module whose output followed it."""
    seen = again(nn.Sequential(nn.Identity(), nn.Linear(2, 2)), torch.tensor([[1.0, math.nan]]))
    assert (seen.batch.nan, seen.batch.elements) == (1, 2)
    assert seen.origin is not None and (seen.origin.module, seen.origin.inside) == ("0", False)


def test_a_mask_is_meant_so() -> None:
    """Minus infinity that a softmax turns into zero is no fault, as an input, an output or between."""
    mask = torch.tensor([0.0, -math.inf])
    model = Does(lambda x: x.softmax(-1), Does(lambda x: x + mask), nn.Identity())
    assert again(model, torch.ones(2, 2)).origin is None


def test_a_logarithm_of_zero_is_no_mask() -> None:
    """Minus infinity that reaches the model's output is told."""
    origin = again(nn.Sequential(nn.ReLU(), Does(torch.log)), torch.tensor([-1.0, 1.0])).origin
    assert origin is not None and origin.module == "1"


def test_a_mask_before_the_fault_does_not_hide_it() -> None:
    """Behind an innocent mask the true fault is found."""
    mask = torch.tensor([0.0, -math.inf])
    attention = Does(lambda x: x.softmax(-1), Does(lambda x: x + mask))
    origin = again(nn.Sequential(attention, Does(lambda x: 1 / x)), torch.ones(2)).origin
    assert origin is not None and origin.module == "1"


def test_weights_that_are_not_finite() -> None:
    """The module's own parameters are looked at."""
    layer = nn.Linear(2, 2)
    layer.weight.data[0, 0] = math.nan
    origin = again(nn.Sequential(layer), torch.ones(1, 2)).origin
    assert origin is not None and origin.weight.nan == 1


def test_modules_that_put_out_zeros() -> None:
    """A module whose output is zero throughout is silent."""
    assert again(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), -torch.ones(1, 2)).silent == ["0"]


def test_dropout_drops_the_same_again() -> None:
    """With the random state of then, the replay's output leaves the same print."""
    model = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5))
    x, surroundings = torch.randn(4, 50), Surroundings([torch.device("cpu")])
    print_then = [number.item() for number in fingerprint(model(x))]
    torch.rand(100)
    assert replay(model, ((x,), {}), surroundings).print == print_then


def test_nothing_stays_of_a_replay() -> None:
    """Gradients, buffers, hooks, random state and the training flag are as they were."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model(torch.randn(4, 2)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model[0].weight.grad.clone()
    torch.manual_seed(5)
    again(model, torch.randn(4, 2, generator=torch.Generator().manual_seed(0)) / 0)
    drawn = torch.rand(1).item()
    torch.manual_seed(5)
    assert drawn == torch.rand(1).item()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, gradient) and model.training
    looked = torch.ones(4, 2)
    assert all(not hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks))
    assert model(looked).requires_grad


def test_a_forward_that_raises_is_told() -> None:
    """The exception becomes text: a diagnosis ends no training."""

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    seen = again(Does(fail, nn.ReLU()), torch.ones(1))
    assert seen.error == "RuntimeError: out of memory" and seen.origin is None


def test_what_is_compiled_runs_step_by_step() -> None:
    """A compiled submodule is looked into, under the names it has without the compiler's wrapper."""
    inner = nn.Sequential(nn.ReLU(), Does(lambda x: x / 0))
    model = nn.Sequential(nn.Identity(), torch.compile(inner, backend="eager"))
    origin = again(model, torch.ones(2)).origin
    assert origin is not None and origin.module == "1.1"


def test_the_attention_takes_the_path_that_training_took() -> None:
    """In eval mode the encoder's fused path, taken only without gradients, would hide its modules."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    seen = again(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), torch.randn(2, 3, 8))
    assert "layers.0.linear1" in seen.order
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, 1), lambda x: {"out": x}, lambda x: [None, x]], ids=["tuple", "dict", "list"]
)
def test_outputs_of_any_structure(wrap: Callable[[Tensor], Any]) -> None:
    """Tensors inside tuples, dicts and lists are looked at."""
    origin = again(nn.Sequential(Does(lambda x: wrap(x / 0))), torch.ones(2)).origin
    assert origin is not None and origin.module == "0"


def test_the_extent_of_several_tensors() -> None:
    """Counts add up, the largest of all is told, integers are left out."""
    extent = extent_of([torch.tensor([0.0, -3.0]), torch.tensor([1, 9]), torch.tensor([math.inf, 2.0])])
    assert extent == Extent(4, 1, 1, 0, 3.0, False)
    assert extent_of([]) == Extent() and extent_of([]).finite


def test_a_mask_is_told_from_what_is_broken() -> None:
    """Only minus infinity may be meant."""
    assert not extent_of([torch.tensor([-math.inf, 1.0])]).broken
    for value in (math.inf, math.nan):
        assert extent_of([torch.tensor([-math.inf]), torch.tensor([value])]).broken
