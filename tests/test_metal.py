"""What "metal" means, who understands it, and that those who learned it are otherwise unchanged."""

import copy
import inspect
import io
import os
import pickle
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from releases import RELEASE
from torch import nn

import lucid
import lucid.nn
from lucid import _metal

ORIGINAL = vars(torch.Tensor.__base__)["to"]
"""PyTorch's own ``Tensor.to``, which the teaching leaves where it is."""

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
REAL = torch.device("mps" if torch.backends.mps.is_available() else ACCELERATOR or "cpu")
ON_CPU = pytest.mark.skipif(REAL.type != "cpu", reason="here the name is not the CPU")


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nobody has used the name yet."""
    monkeypatch.setattr(_metal, "_cpu_was_said", False)


def machine(monkeypatch: pytest.MonkeyPatch, mps: bool, accelerator: str | None) -> None:
    """Pretend to be another machine."""
    found = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: found)


# What the name means


@pytest.mark.parametrize(
    ("mps", "accelerator", "name", "meaning"),
    [
        (True, "mps", "metal", "mps"),
        (True, "mps", "metal:0", "mps:0"),
        (True, "privateuseone", "metal", "mps"),
        (False, "cuda", "metal", "cuda"),
        (False, "cuda", "metal:0", "cuda:0"),
        (False, "cuda", "metal:3", "cuda:3"),
        (False, "xpu", "metal:1", "xpu:1"),
        (False, None, "metal", "cpu"),
        (False, None, "metal:0", "cpu"),
    ],
)
def test_the_name_is_apples_gpu_then_the_accelerator_then_the_cpu(
    monkeypatch: pytest.MonkeyPatch, mps: bool, accelerator: str | None, name: str, meaning: str
) -> None:
    """Apple's GPU comes first, then the machine's accelerator, and the CPU where there is neither."""
    machine(monkeypatch, mps, accelerator)
    assert _metal.real_device(name) == torch.device(meaning)
    assert _metal.device_type(name) == torch.device(meaning).type


@pytest.mark.parametrize("spec", ["cpu", "cuda:1", "meta", "metallic", "Metal", "", 0, None, torch.device("meta")])
def test_anything_but_the_name_is_handed_back_as_it_came(spec: object) -> None:
    """Only "metal" and "metal:<index>" are names; the rest is PyTorch's to judge."""
    assert _metal.real_device(spec) is spec


def test_autocast_is_told_the_type_of_a_device() -> None:
    """A torch.device becomes its type; a string that is not the name stays."""
    assert _metal.device_type(torch.device("cuda", 1)) == "cuda"
    assert _metal.device_type("xpu") == "xpu"


@pytest.mark.parametrize("name", ["metal:", "metal:x", "metal:-1", "metal:01", "metal:1.0", "metal: 0"])
def test_a_malformed_name_is_refused_in_its_own_words(name: str) -> None:
    """The message holds what was written, not the device it would have become."""
    for ask in (_metal.real_device, lucid.device, torch.ones(1).to):
        with pytest.raises(RuntimeError, match=f"^Invalid device string: '{name}'; write \"metal\""):
            ask(name)


def test_the_cpu_has_no_second_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the name is the CPU only index 0 exists, as on a GPU machine only its own indices do."""
    machine(monkeypatch, mps=False, accelerator=None)
    with pytest.raises(RuntimeError, match=r'\'metal:1\' was asked for, but "metal" is the CPU here'):
        _metal.real_device("metal:1")


# The warning


def _load_on_metal() -> object:
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    return lucid.load(file, map_location="metal")


SPEAKERS: dict[str, Callable[[], object]] = {
    "Tensor.to": lambda: torch.ones(1).to("metal"),
    "Module.to": lambda: nn.Linear(1, 1).to(device="metal"),
    "creation": lambda: lucid.ones(1, device="metal"),
    "device": lambda: lucid.device("metal"),
    "load": _load_on_metal,
    "autocast": lambda: lucid.amp.autocast(),
}


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_the_cpu_is_said_once_at_the_users_line(unwarned: None, monkeypatch: pytest.MonkeyPatch, speaker: str) -> None:
    """The first use of the name on a machine without an accelerator warns, at the user's line; no other does."""
    machine(monkeypatch, mps=False, accelerator=None)
    with pytest.warns(UserWarning, match='"metal" is the CPU on this machine') as said:
        SPEAKERS[speaker]()
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for speak in SPEAKERS.values():
            speak()


def test_threads_warn_once_between_them(unwarned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning a process, also when eight threads use the name at the same moment."""
    machine(monkeypatch, mps=False, accelerator=None)
    together = threading.Barrier(8)

    def use() -> None:
        together.wait()
        _metal.real_device("metal")

    with pytest.warns(UserWarning, match="metal") as said:
        in_threads(use, 8)
    assert len(said) == 1


def test_an_accelerator_needs_no_warning(unwarned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the name is a GPU nothing is said."""
    machine(monkeypatch, mps=False, accelerator="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _metal.real_device("metal").type == "cuda"


def in_threads(work: Callable[[], None], number: int) -> None:
    """Run ``work`` in so many threads at once."""
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Tensor.to and Module.to


@pytest.mark.parametrize(
    ("args", "kwargs", "dtype"),
    [
        (("metal",), {}, torch.float32),
        (("metal:0",), {}, torch.float32),
        ((), {"device": "metal"}, torch.float32),
        ((), {"device": "metal", "dtype": torch.float16}, torch.float16),
        (("metal", torch.bfloat16), {}, torch.bfloat16),
        (("metal", torch.float16, True, True), {}, torch.float16),
        (("metal",), {"dtype": torch.int32, "copy": True}, torch.int32),
        (("metal",), {"memory_format": torch.preserve_format}, torch.float32),
    ],
)
def test_a_tensor_goes_to_metal(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    """Positional or by keyword, with a dtype or not: the result is a plain tensor on the real device."""
    moved = torch.arange(3.0).to(*args, **kwargs)
    assert type(moved) is torch.Tensor
    assert (moved.device.type, moved.dtype) == (REAL.type, dtype)
    assert moved.tolist() == [0, 1, 2]
    unbound = torch.Tensor.to(torch.arange(3.0), *args, **kwargs)
    assert (unbound.device, unbound.dtype) == (moved.device, dtype)


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    """``to("metal")`` on the real device returns the tensor itself, as PyTorch's does; copy=True does not."""
    there = torch.ones(2, device=REAL)
    assert there.to("metal") is there
    assert there.to("metal", copy=True) is not there


@pytest.mark.parametrize("arguments", [("metal",), ("metal", torch.float16)])
def test_a_module_goes_to_metal_in_place(arguments: tuple[Any, ...]) -> None:
    """``Module.to`` returns the module, whose parameters and buffers now live on the real device."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert model.to(*arguments) is model
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {REAL.type}
    assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in model.parameters())
    assert model[0].weight.dtype is (torch.float16 if len(arguments) > 1 else torch.float32)
    assert model.to(device="metal", dtype=torch.float32)[0].weight.dtype is torch.float32


def test_a_parameter_goes_to_metal_in_the_graph() -> None:
    """A Parameter's ``to`` is differentiable: the gradient arrives at the parameter."""
    parameter = nn.Parameter(torch.ones(2))
    (parameter.to("metal", torch.float64 if REAL.type != "mps" else torch.float16) * 3).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3, 3]


def test_a_packed_sequence_goes_to_metal() -> None:
    """What is neither tensor nor module reads its arguments itself, and is given the device."""
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert packed.to(lucid.device("metal")).data.device.type == REAL.type


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("nonsense",), {}),
        (("cpu:x",), {}),
        ((3.5,), {}),
        ((torch.float32, "cpu"), {}),
        ((torch.float32,), {"device": "cpu"}),
        ((), {"gadget": "cpu"}),
        (("cpu",), {"device": "cpu"}),
    ],
)
def test_every_other_argument_is_judged_by_pytorch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What PyTorch refuses is refused with its own error, word for word."""

    def outcome(call: Callable[..., Any]) -> tuple[type, str]:
        try:
            return type(call(torch.ones(1), *args, **kwargs)), ""
        except Exception as error:
            return type(error), str(error)

    assert outcome(lambda x, *a, **k: x.to(*a, **k)) == outcome(ORIGINAL)


@pytest.mark.parametrize("owner", [torch.Tensor, nn.Module])
def test_to_equals_and_hashes_as_the_original(owner: type) -> None:
    """Tables, lists and sets find it under PyTorch's own, and PyTorch's own under it."""
    to = vars(owner)["to"]
    original = inspect.unwrap(to)
    assert type(to) is _metal.To
    assert type(original) is not _metal.To, "it was taught twice"
    assert owner.to is to
    assert to == original
    assert original == to
    assert hash(to) == hash(original)
    assert {to: 1}[original] == {original: 1}[to] == 1
    assert to in [original]
    assert original in {to}
    assert to != torch.Tensor.add
    assert to != "to"


@pytest.mark.parametrize("owner", [torch.Tensor, nn.Module])
def test_to_looks_like_the_original(owner: type) -> None:
    """Its name, documentation, signature, copies and pickles are the original's."""
    to, original = owner.to, inspect.unwrap(owner.to)
    assert (to.__name__, to.__qualname__, to.__doc__) == ("to", original.__qualname__, original.__doc__)
    assert repr(to) == repr(original)
    assert inspect.isroutine(to) == inspect.isroutine(original)
    assert copy.copy(to) is copy.deepcopy(to) is to
    assert pickle.loads(pickle.dumps(to)) is to
    if owner is nn.Module:
        assert inspect.signature(to) == inspect.signature(original)
    else:
        assert to.__objclass__ is original.__objclass__
    with pytest.raises(AttributeError):
        to.nothing  # noqa: B018


def test_teaching_again_changes_nothing() -> None:
    """``teach`` is idempotent, in eight threads as well."""
    before = vars(torch.Tensor)["to"], vars(nn.Module)["to"]
    in_threads(_metal.teach, 8)
    assert (vars(torch.Tensor)["to"], vars(nn.Module)["to"]) == before
    assert vars(torch.Tensor)["to"] is before[0]


def test_pytorchs_tables_know_it() -> None:
    """``torch.overrides`` takes it for the tensor method that it is."""
    assert torch.overrides.is_tensor_method_or_property(torch.Tensor.to)
    assert torch.overrides.resolve_name(torch.Tensor.to) == "torch.Tensor.to"
    assert torch.Tensor.to in torch.overrides.get_testing_overrides()
    assert torch.Tensor.to in torch.overrides.get_overridable_functions()[torch.Tensor]


def test_lazy_modules_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy parameter allows little, ``to`` among it; a plain function in its place would be refused."""
    assert nn.LazyLinear(3).to(torch.float64)(torch.ones(1, 2, dtype=torch.float64)).shape == (1, 3)
    assert nn.LazyLinear(3).to("metal")(torch.ones(1, 2, device=REAL)).device.type == REAL.type
    plain: Callable[..., Any] = lambda self, *args, **kwargs: ORIGINAL(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "to", plain)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        nn.LazyLinear(3).to(torch.float64)


class Tabled(torch.Tensor):
    """A subclass that knows what it does by a table, as many do."""

    table: ClassVar = {ORIGINAL: lambda x, *args, **kwargs: ("to", args, kwargs)}

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.table:
            return cls.table[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, kinds, args, kwargs or {})


def test_a_subclass_is_asked_by_its_table() -> None:
    """A table keyed by the original finds ``to``, and gets the real device."""
    tensor = torch.ones(2).as_subclass(Tabled)
    assert tensor.to(torch.float64, non_blocking=True) == ("to", (torch.float64,), {"non_blocking": True})
    assert tensor.to("metal") == ("to", (REAL,), {})
    assert tensor.to(device="metal", copy=True) == ("to", (), {"device": REAL, "copy": True})


def test_a_subclass_without_a_table_keeps_its_type() -> None:
    """PyTorch's default ``__torch_function__`` calls what it was handed, and wraps the result."""

    class Plain(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Plain).to(torch.float64)) is Plain
    assert type(torch.ones(2).as_subclass(Plain).to("metal", copy=True)) is Plain


def test_a_subclass_with_its_own_to_reaches_ours_by_super() -> None:
    """An override sees what the user wrote, and its ``super().to`` understands it."""
    asked = []

    class Own(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(args)
            return super().to(*args, **kwargs)

    model = Own(1, 1).to("metal")
    assert asked == [("metal",)]
    assert model.weight.device.type == REAL.type


def test_a_mode_receives_pytorchs_to() -> None:
    """A TorchFunctionMode sees the original, with the real device."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, *args[1:]))
            return func(*args, **(kwargs or {}))

    with Watch():
        moved = torch.ones(2).to("metal")
    assert moved.device.type == REAL.type
    assert (ORIGINAL, REAL) in seen


def test_fake_tensors_go_to_metal() -> None:
    """A FakeTensor stays one."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2)
        assert type(fake.to("metal")) is FakeTensor
        assert fake.to("metal", torch.float16).dtype is torch.float16


@pytest.mark.skipif(REAL.type == "mps", reason="PyTorch makes no device mesh on mps")
def test_dtensors_go_to_metal(one_process: None) -> None:
    """A DTensor stays one, with its placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(REAL.type, (1,))
    spread = DTensor.from_local(torch.ones(2, 2, device=REAL), mesh, [Shard(0)], run_check=False)
    for moved in (spread.to("metal"), spread.to("metal", torch.float16), spread.to(torch.float16)):
        assert type(moved) is DTensor
        assert moved.placements == (Shard(0),)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "nccl" if REAL.type == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_transforms_trace_through_to() -> None:
    """``vmap``, ``grad`` and ``jacrev`` see the operator below."""
    x = torch.arange(4.0)
    assert torch.vmap(lambda row: row.to("metal", torch.float16) * 2)(x).tolist() == [0, 2, 4, 6]
    assert torch.vmap(lambda row: row.to(torch.int32))(x).dtype is torch.int32
    assert torch.func.grad(lambda y: y.to("metal").pow(2).sum())(x).tolist() == [0, 2, 4, 6]
    assert torch.func.jacrev(lambda y: y.to("metal") * 3)(x).diagonal().tolist() == [3, 3, 3, 3]


def test_fx_records_the_method() -> None:
    """A symbolic trace holds a call of the method ``to``, as without us."""
    traced = torch.fx.symbolic_trace(lambda x: x.to(torch.float64))
    assert ("call_method", "to") in {(node.op, node.target) for node in traced.graph.nodes}
    assert traced(torch.ones(1)).dtype is torch.float64


class Moving(nn.Module):
    """A module that moves what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """To metal by each way that a tensor may go."""
        moved = x.to("metal") + x.to(device="metal:0", dtype=torch.float32)
        return self.inner(moved) + lucid.zeros(2, device="metal") + x.to(torch.float16).to(REAL).float()


class MovingItself(Moving):
    """One that moves a part of itself, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """To metal by every way."""
        self.inner.to("metal")
        return super().forward(x)


NO_MODULE_MOVES = pytest.mark.skipif(
    RELEASE < (2, 13),
    reason="below 2.13 the compiler takes no Module.to into a graph, or none but PyTorch's own",
)


@pytest.mark.parametrize("kind", [Moving, pytest.param(MovingItself, marks=NO_MODULE_MOVES)])
@pytest.mark.parametrize("said", [False, True], ids=["first use of the name", "later use"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_takes_the_whole_graph(
    monkeypatch: pytest.MonkeyPatch, backend: str, said: bool, kind: type[Moving]
) -> None:
    """``torch.compile(fullgraph=True)`` traces tensors, modules and creation, before and after the warning."""
    model, x = kind().to(REAL), torch.ones(1, 2)
    expected = model(x)
    monkeypatch.setattr(_metal, "_cpu_was_said", said)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), expected)


def test_export_holds_the_conversion() -> None:
    """``torch.export`` traces ``to`` and keeps nothing of the name in the program."""

    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to("metal").to(torch.float16) + lucid.ones(2, device="metal").to(torch.float16)

    program = torch.export.export(Half(), (torch.ones(2, device=REAL),))
    assert "metal" not in str(program.graph)
    assert program.module()(torch.ones(2, device=REAL)).tolist() == [2, 2]


SPEED = """
import time, torch, lucid.nn
taught, x = vars(torch.Tensor)["to"], torch.ones(2)

def seconds_each(number=500):
    start = time.perf_counter()
    for _ in range(number):
        x.to(torch.float32)
    return (time.perf_counter() - start) / number

with_name, without = [], []
for _ in range(400):
    torch.Tensor.to = taught
    with_name.append(seconds_each())
    del torch.Tensor.to
    without.append(seconds_each())
print(min(with_name) - min(without))
"""


@pytest.mark.alone
def test_knowing_the_name_costs_less_than_a_microsecond() -> None:
    """Conversions by the taught and the original method in turn: the best of each differ by under a microsecond."""
    # In a process of its own, which no coverage measures.
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run([sys.executable, "-c", SPEED], env=quiet, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1e-6


# What is looked up in lucid


def _arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments for each creation function, without a device."""
    one, indices = torch.ones(2, 2), torch.tensor([0, 1, 2])
    shape: dict[str, tuple[Any, ...]] = dict.fromkeys(("empty", "ones", "zeros", "rand", "randn"), (2, 3))
    like = dict.fromkeys(("empty_like", "ones_like", "zeros_like", "rand_like", "randn_like"), (one,))
    window = dict.fromkeys((name for name in _metal.CREATION if name.endswith("_window")), (4,))
    compressed = (indices, torch.tensor([0, 1]), torch.ones(2), (2, 2))
    blocked = (indices, torch.tensor([0, 1]), torch.ones(2, 1, 1), (2, 2))
    return {
        **shape,
        **like,
        **window,
        "arange": (4,),
        "as_tensor": ([1.0],),
        "asarray": ([1.0],),
        "empty_permuted": ((2, 3), (1, 0)),
        "empty_strided": ((2, 3), (1, 2)),
        "eye": (2,),
        "from_dlpack": (torch.ones(2),),
        "full": ((2,), 1.0),
        "full_like": (one, 1.0),
        "linspace": (0, 1, 3),
        "logspace": (0, 1, 3),
        "normal": (0.0, 1.0, (2,)),
        "randint": (4, (2,)),
        "randint_like": (one, 4),
        "randperm": (4,),
        "scalar_tensor": (1.0,),
        "sparse_bsc_tensor": blocked,
        "sparse_bsr_tensor": blocked,
        "sparse_coo_tensor": (torch.tensor([[0, 1]]), torch.ones(2)),
        "sparse_csc_tensor": compressed,
        "sparse_csr_tensor": compressed,
        "tensor": ([1.0],),
        "tril_indices": (2, 2),
        "triu_indices": (2, 2),
    }


ELSEWHERE = {"from_file", "range", "sparse_compressed_tensor", "empty_quantized"}
"""Creation functions with a test of their own below, for their own arguments or warnings."""


def test_every_creation_function_has_arguments_here() -> None:
    """No name in the table goes untested."""
    present = {name for name in _metal.CREATION if hasattr(torch, name)}
    assert set(_arguments()) | ELSEWHERE == present


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", sorted(_metal.CREATION - ELSEWHERE))
def test_a_creation_function_makes_a_plain_tensor_on_the_real_device(name: str) -> None:
    """With the name, a torch.Tensor there; without it, what torch's own function makes."""
    if name.startswith("sparse_") and REAL.type == "mps":
        pytest.skip("PyTorch has no such tensors on Apple's GPU")
    create, arguments = getattr(lucid, name), _arguments()[name]
    made = create(*arguments, device="metal")
    assert type(made) is torch.Tensor
    assert made.device.type == REAL.type
    ours, torchs = create(*arguments, device="cpu"), getattr(torch, name)(*arguments, device="cpu")
    assert (ours.shape, ours.dtype, ours.device, ours.layout) == (
        torchs.shape,
        torchs.dtype,
        torchs.device,
        torchs.layout,
    )
    with pytest.raises(RuntimeError, match="nonsense"):
        create(*arguments, device="nonsense")


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.range is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@ON_CPU
def test_the_remaining_creation_functions_understand_the_name(tmp_path: Any) -> None:
    """Those with arguments of their own kind."""
    (tmp_path / "numbers").write_bytes(bytes(8))
    assert lucid.from_file(str(tmp_path / "numbers"), size=2, device="metal").tolist() == [0, 0]
    assert lucid.range(0, 2, device="metal").tolist() == [0, 1, 2]
    indices, columns = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    made = lucid.sparse_compressed_tensor(
        indices, columns, torch.ones(2), (2, 2), layout=torch.sparse_csr, device="metal"
    )
    assert made.layout is torch.sparse_csr
    scales, zeros = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    example = torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)
    assert lucid.empty_quantized((2, 2), example, device="metal").is_quantized


def test_every_function_of_torch_that_makes_a_tensor_on_a_device_is_in_the_table() -> None:
    """PyTorch's own signatures say which functions take ``device`` and return a tensor: the table has them all."""
    schemas = torch._C._jit_get_all_schemas()
    makers = {
        schema.name.removeprefix("aten::")
        for schema in schemas
        if any(argument.name == "device" for argument in schema.arguments)
        and [str(result.type) for result in schema.returns] == ["Tensor"]
    }
    public = {name for name in makers if hasattr(torch, name) and not name.startswith("_")}
    assert len(public) > 30, "the signatures could not be read"
    assert public <= _metal.CREATION


def test_a_creation_function_is_one_object_and_pickles() -> None:
    """Looked up twice it is the same, by its own name and module."""
    assert lucid.randn is lucid.randn
    assert pickle.loads(pickle.dumps(lucid.randn)) is lucid.randn
    assert (lucid.randn.__name__, lucid.randn.__doc__) == ("randn", torch.randn.__doc__)


def test_a_creation_function_follows_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who replaces ``torch.ones`` replaces what ``lucid.ones`` calls."""
    monkeypatch.setattr(torch, "ones", wrapped := types.FunctionType((lambda: "patched").__code__, {}, "ones"))
    assert wrapped() == lucid.ones() == "patched"


@pytest.mark.parametrize(
    ("args", "kwargs", "meaning"),
    [
        (("metal",), {}, REAL),
        (("metal", 0), {}, torch.device(REAL.type) if REAL.type == "cpu" else torch.device(REAL.type, 0)),
        (("cuda", 1), {}, torch.device("cuda:1")),
        (("cuda:2",), {}, torch.device("cuda:2")),
        ((torch.device("meta"),), {}, torch.device("meta")),
        ((), {"type": "metal"}, REAL),
        ((), {"device": "metal"}, REAL),
        ((), {"type": "cuda", "index": 3}, torch.device("cuda:3")),
    ],
)
def test_device_makes_torchs_devices(args: tuple[Any, ...], kwargs: dict[str, Any], meaning: torch.device) -> None:
    """``lucid.device`` takes what ``torch.device`` takes, and the name; it gives a torch.device."""
    made = lucid.device(*args, **kwargs)
    assert type(made) is torch.device
    assert made == meaning


def test_device_is_the_class_of_devices() -> None:
    """``isinstance``, ``issubclass``, ``match`` and annotations work as with torch.device."""
    assert isinstance(torch.device("cpu"), lucid.device)
    assert not isinstance("cpu", lucid.device)
    assert issubclass(torch.device, lucid.device)
    assert not issubclass(str, lucid.device)
    assert isinstance(lucid.device, type)
    assert pickle.loads(pickle.dumps(lucid.device)) is lucid.device
    match torch.device("cpu"):
        case lucid.device(type="cpu"):
            pass
        case _:
            pytest.fail("a torch.device is no lucid.device")


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("metal:0", 0), ("metal", 0, 0), ("metal", "0"), (3.5,)])
def test_device_refuses_what_torch_refuses(arguments: tuple[Any, ...]) -> None:
    """The errors are torch.device's own kinds."""
    known = ["cpu" + a[5:] if isinstance(a, str) and a.startswith("metal") else a for a in arguments]
    with pytest.raises(Exception) as torchs:
        torch.device(*known)
    with pytest.raises(torchs.type):
        lucid.device(*arguments)


def test_a_device_is_a_scope() -> None:
    """``with lucid.device("metal")`` makes tensors there, as PyTorch's devices do."""
    with lucid.device("metal"):
        assert torch.ones(1).device.type == REAL.type


@pytest.mark.parametrize("location", ["metal", "metal:0", torch.device("cpu"), "cpu", {"cpu": "metal"}, None])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_load_understands_the_name(location: Any, by_keyword: bool, tmp_path: Any) -> None:
    """As ``map_location`` by keyword or position, and as a value of a mapping."""
    torch.save({"weight": torch.arange(2.0)}, tmp_path / "state")
    path = tmp_path / "state"
    loaded = lucid.load(path, map_location=location) if by_keyword else lucid.load(path, location)
    asks = "metal" in str(location)
    assert loaded["weight"].device.type == (REAL.type if asks else "cpu")
    assert loaded["weight"].tolist() == [0, 1]


def test_load_hands_the_rest_on(tmp_path: Any) -> None:
    """A function as ``map_location`` and ``weights_only`` are PyTorch's business."""
    torch.save(torch.arange(2.0), tmp_path / "state")
    asked = []

    def where(storage: Any, location: str) -> Any:
        asked.append(location)
        return storage

    assert lucid.load(tmp_path / "state", map_location=where, weights_only=True).tolist() == [0, 1]
    assert asked == ["cpu"]


# What does not know the name


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.randn(2, device="metal"),
        lambda: torch.device("metal"),
        lambda: torch.ones(1).new_zeros(1, device="metal"),
        lambda: nn.Linear(1, 1, device="metal"),
        lambda: torch.autocast("metal"),
    ],
)
def test_elsewhere_pytorchs_own_error_stands(call: Callable[[], object]) -> None:
    """Only ``to`` and what is looked up in lucid were taught."""
    with pytest.raises(RuntimeError, match=r"metal"):
        call()


def test_pytorchs_out_of_tree_slot_is_untouched() -> None:
    """The name is not registered with PyTorch, which would take it for the machine's accelerator."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not hasattr(torch.Tensor, "metal")
    assert not hasattr(torch, "metal")
