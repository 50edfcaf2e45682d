"""What ``scale`` does to a tensor of each dtype, and to containers of tensors in any nesting."""

import math
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from values import WITHOUT_FLOAT64, bits, numbers, same

from lucid.amp import GradScaler

S = 65536.0
SHAPES = [(), (1,), (3,), (2, 3), (0,)]
DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


def scale(outputs: Any, by: float = S) -> Any:
    """The outputs as a fresh scaler scales them."""
    return GradScaler(by).scale(outputs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_dtype_at_every_rank(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """float16 comes back as float32, every other dtype as it was, from zero dimensions on; the input is untouched."""
    if device.type in WITHOUT_FLOAT64 and dtype in (torch.float64, torch.complex128):
        pytest.skip(f"{device.type} has no float64")
    output = torch.full(shape, 3.0, dtype=dtype, device=device)
    scaled = scale(output)
    assert (scaled.dtype, scaled.shape, scaled.device.type) == (DTYPES[dtype], output.shape, device.type)
    assert bool((scaled == 3.0 * S).all())
    assert bool((output == 3.0).all())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_half_complex_output_stays_one() -> None:
    """(3 + 1j) · 4 = 12 + 4j in complex32."""
    scaled = scale(torch.tensor([3 + 1j]).to(torch.complex32), by=4.0)
    assert scaled.dtype is torch.complex32
    assert scaled.to(torch.complex64).tolist() == [12 + 4j]


def test_a_half_loss_does_not_overflow() -> None:
    """3 · 65536 = 196608 is beyond float16 and not beyond float32, at one dimension too."""
    for half in (torch.tensor(3.0).half(), torch.tensor([3.0]).half()):
        assert scale(half).flatten().tolist() == [196608.0]
    assert scale(torch.tensor(65504.0).half()).item() == 65504.0 * S


@pytest.mark.parametrize("by", [3.0, 0.1, 1000.1, 65536.0, 2.0**-126, 2.0**127])
def test_a_bfloat16_is_multiplied_in_float32_and_rounded_once(by: float) -> None:
    """A bfloat16 factor would be another number: 1000.1 would become 1000."""
    output = bits("bfloat16")
    with np.errstate(all="ignore"):
        wanted = reference.bfloat16(numbers(output) * np.float32(reference.float32(by)))
    assert same(numbers(scale(output, by)), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_float_is_multiplied_in_its_own_dtype(dtype: str) -> None:
    """Each product is the correctly rounded one; the factor is the float32 that get_scale() tells."""
    output = bits(dtype)
    with np.errstate(all="ignore"):
        wanted = numbers(output) * np.dtype(dtype).type(reference.float32(1000.1))
    assert same(numbers(scale(output, 1000.1)), wanted)


def test_the_gradient_is_scaled() -> None:
    """d(s · 3x)/dx = 3s."""
    leaf = torch.ones(2, requires_grad=True)
    scale((leaf * 3.0).sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0 * S] * 2


def test_the_scale_of_now_is_used_each_time() -> None:
    """After update() the next loss is multiplied by the new scale."""
    scaler = GradScaler(4.0)
    assert scaler.scale(torch.ones(())).item() == 4.0
    scaler.update(8.0)
    assert scaler.scale(torch.ones(())).item() == 8.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scaler.scale(torch.ones(2, dtype=torch.bfloat16)).tolist() == [2.0, 2.0]


def test_a_loss_scaled_before_an_update_is_too_late() -> None:
    """The factor has moved in place: PyTorch's own error stands."""
    leaf, scaler = torch.ones(2, requires_grad=True), GradScaler(4.0)
    loss = scaler.scale(leaf.sum())
    scaler.update(8.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Containers.

Pair = namedtuple("Pair", ["loss", "extra"])


class Named(NamedTuple):
    """A named tuple with a default."""

    loss: Tensor
    extra: Tensor | None = None


class Losses(list[Any]):
    """A list of a user's own."""


class Triple(tuple[Any, ...]):
    """A tuple of a user's own."""


class Wrapping(MutableMapping[str, Any]):
    """A mapping that keeps the dict it was given."""

    def __init__(self, inside: dict[str, Any]) -> None:
        self.inside = inside

    def __getitem__(self, key: str) -> Any:
        return self.inside[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inside[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inside[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inside)

    def __len__(self) -> int:
        return len(self.inside)


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dict with fields beside its items, as model libraries return them."""

    note: str = "kept"
    tags: list[str] = field(default_factory=list)


def one() -> Tensor:
    """A loss of 1."""
    return torch.ones(())


def model_output() -> ModelOutput:
    """One with an item and fields that are not their defaults."""
    output = ModelOutput("noted", ["a"])
    output["loss"] = one()
    return output


CONTAINERS: dict[str, Any] = {
    "list": lambda: [one(), one()],
    "tuple": lambda: (one(), one()),
    "empty list": lambda: [],
    "empty tuple": lambda: (),
    "dict": lambda: {"a": one(), 3: one()},
    "empty dict": lambda: {},
    "named tuple": lambda: Pair(one(), one()),
    "typed named tuple": lambda: Named(one()),
    "list subclass": lambda: Losses([one()]),
    "tuple subclass": lambda: Triple([one(), None]),
    "ordered dict": lambda: OrderedDict(b=one(), a=one()),
    "default dict": lambda: defaultdict(list, a=one()),
    "user dict": lambda: UserDict(a=one()),
    "read-only mapping": lambda: MappingProxyType({"a": one()}),
    "wrapping mapping": lambda: Wrapping({"a": one()}),
    "model output": model_output,
    "torch.return_types": lambda: torch.aminmax(torch.ones(3)),
    "nested": lambda: [{"a": (one(), None, [Pair(one(), {"b": [one()]})])}, None],
}


def leaves(outputs: Any) -> list[Any]:
    """The leaves in order."""
    if isinstance(outputs, Tensor) or outputs is None:
        return [outputs]
    items = list(outputs.values()) if hasattr(outputs, "values") and hasattr(outputs, "keys") else list(outputs)
    return [leaf for item in items for leaf in leaves(item)]


def structure(outputs: Any) -> Any:
    """Types and keys, all the way down."""
    if isinstance(outputs, Tensor) or outputs is None:
        return type(outputs)
    if hasattr(outputs, "keys") and hasattr(outputs, "values"):
        return type(outputs), {key: structure(outputs[key]) for key in outputs}
    return type(outputs), [structure(item) for item in outputs]


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_keeps_type_and_structure(name: str) -> None:
    """Every tensor is scaled, None stays, and the user's own container holds what it held."""
    outputs = CONTAINERS[name]()
    before = leaves(outputs)
    scaled = scale(outputs)
    assert structure(scaled) == structure(outputs)
    assert [None if leaf is None else leaf.item() for leaf in leaves(scaled)] == [
        None if leaf is None else S for leaf in before
    ]
    assert all(found is leaf for found, leaf in zip(leaves(outputs), before, strict=True))
    assert all(leaf is None or leaf.item() == 1.0 for leaf in before)


def test_what_a_mapping_has_beside_its_items_is_kept() -> None:
    """The factory of a default dict, the fields of a model's output, the order of keys."""
    factory = scale(defaultdict(list, a=one()))
    assert factory["missing"] == []
    output = scale(model_output())
    assert (output.note, output.tags) == ("noted", ["a"])
    assert list(scale(OrderedDict(b=one(), a=one()))) == ["b", "a"]


def test_none_alone_stays() -> None:
    """A None leaf is nothing to scale."""
    assert scale(None) is None
    assert scale([None, None]) == [None, None]


def test_generators_and_other_iterators_become_lists() -> None:
    """They can be read once only, so that a list comes back."""
    for outputs in ((one() for _ in range(2)), iter([one(), one()]), map(torch.Tensor.clone, [one(), one()])):
        scaled = scale(outputs)
        assert type(scaled) is list
        assert [loss.item() for loss in scaled] == [S, S]


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(3),
        torch.tensor(True),
        torch.tensor(3, dtype=torch.uint8),
        3.0,
        3,
        True,
        "loss",
        b"loss",
        np.float32(3.0),
        np.ones(2),
        {torch.ones(())},
        deque([torch.ones(())]),
        object(),
        Tensor,
    ],
    ids=lambda leaf: f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}",
)
def test_anything_else_is_refused_and_located(leaf: Any) -> None:
    """A TypeError names what was found, and where in the outputs."""
    found = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
    with pytest.raises(TypeError, match=found):
        scale(leaf)
    with pytest.raises(TypeError, match=r"outputs\[1\]\['loss'\]\[0\]") as raised:
        scale([one(), {"loss": (leaf,)}])
    assert found in str(raised.value)


def test_a_refusal_leaves_what_was_given_as_it_was() -> None:
    """Nothing in the container has changed, whichever leaf is refused."""
    loss = one()
    outputs = {"a": loss, "b": "no tensor"}
    with pytest.raises(TypeError):
        scale(outputs)
    assert outputs == {"a": loss, "b": "no tensor"}
    assert outputs["a"] is loss
    assert loss.item() == 1.0


def test_infinite_losses_pass() -> None:
    """What is not finite stays so; the step will tell."""
    assert scale(torch.tensor(math.inf)).item() == math.inf
    assert math.isnan(scale(torch.tensor(math.nan)).item())


def test_a_validation_pass_in_inference_mode_may_come_first() -> None:
    """The factor that it makes on the device serves the training that follows, and moves with the scale."""
    scaler, leaf = GradScaler(4.0), torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        assert scaler.scale(torch.ones(())).item() == 4.0
    scaler.update(8.0)
    scaler.scale(leaf.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [8.0, 8.0]


def test_a_first_use_under_fake_tensors_leaves_none_behind() -> None:
    """Who estimates memory with fake tensors first trains with real ones afterwards: 3 · 8 = 24."""
    scaler = GradScaler(8.0)
    with FakeTensorMode():
        assert type(scaler.scale(torch.ones(2))) is FakeTensor
    assert scaler.scale(torch.tensor([3.0])).tolist() == [24.0]


def test_a_fake_tensor_of_a_device_that_is_not_there_is_scaled() -> None:
    """Memory is estimated for a GPU on a machine without one, whose PyTorch may know no CUDA."""
    with FakeTensorMode():
        scaled = GradScaler(8.0).scale(torch.ones(2, device="cuda"))
    assert (type(scaled), scaled.device.type) == (FakeTensor, "cuda")


def test_a_first_use_inside_a_capture_is_refused(device: torch.device) -> None:
    """The factor must lie outside the graph that follows it: RuntimeError says to call scale once before."""
    if device.type != "cuda":
        pytest.skip("only CUDA captures graphs")
    scaler, loss = GradScaler(4.0), torch.ones((), device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        loss.add(1.0)  # PyTorch warns of a graph that holds nothing
        with pytest.raises(RuntimeError, match=r"Call scale\(\) once"):
            scaler.scale(loss)
    scaler.scale(loss)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled = scaler.scale(loss)
    scaler.update(16.0)
    graph.replay()
    assert scaled.item() == 16.0
