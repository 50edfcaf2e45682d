"""The mode that a scope turns on: what it obeys, what it leaves alone, and that nothing of it remains."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lucid.amp import autocast
from lucid.amp._half import _mode, _processor


class Spy:
    """Stands in for a handler and counts how often an operator was replaced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.replaced: list[torch.dtype] = []
        original = _mode._replaced

        def replaced(settings: Any, func: Any, args: Any, kwargs: Any) -> Any:
            result = original(settings, func, args, kwargs)
            if isinstance(result, Tensor) and type(result.grad_fn).__name__.startswith(("Linear", "Product")):
                self.replaced.append(result.dtype)
            return result

        patch.setattr(_mode, "_replaced", replaced)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """What was replaced in this test."""
    return Spy(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test no mode, no setting and no copy of a weight is left."""
    yield
    assert not is_any_mode_on()
    assert not _mode.thread.settings
    assert not _mode.thread.weights._copies


def is_any_mode_on() -> bool:
    """Whether PyTorch would ask a mode about an operator."""
    return torch.overrides.has_torch_function((torch.ones(1),))


def wide(half: torch.dtype = torch.float16) -> autocast:
    """The scope under test."""
    return autocast("cpu", half, arithmetic="float32")


X = torch.ones(2, 2, requires_grad=True)


def test_replaces_inside_and_not_outside(spy: Spy) -> None:
    """A product is replaced in the scope, and PyTorch's own before and after."""
    _ = X @ X
    with wide():
        _ = X @ X
    _ = X @ X
    assert spy.replaced == [torch.float16]


def test_native_turns_nothing_on() -> None:
    """With native arithmetic there is no mode at all."""
    with autocast("cpu", arithmetic="native"):
        assert not is_any_mode_on()


def test_units_for_everything_turn_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where "auto" picks native for every kind of operator there is no mode either."""
    monkeypatch.setattr(_processor, "faster", lambda _: dict.fromkeys(_processor.KINDS, "native"))
    with autocast("cpu"):
        assert not is_any_mode_on()


def test_a_disabled_scope_turns_nothing_on() -> None:
    """Neither is there with ``enabled=False``."""
    with autocast("cpu", enabled=False, arithmetic="float32"):
        assert not is_any_mode_on()


def test_a_nested_disabled_scope_is_obeyed(spy: Spy) -> None:
    """PyTorch's and our own ``enabled=False`` inside are obeyed: nothing is replaced, float32 stays."""
    for inner in (torch.autocast("cpu", enabled=False), autocast("cpu", enabled=False)):
        with wide(), inner:
            assert (X @ X).dtype is torch.float32
    assert spy.replaced == []


def test_nested_scopes_of_another_dtype(spy: Spy) -> None:
    """The innermost scope's dtype holds, ours or PyTorch's, and the outer one's again afterwards."""
    with wide(torch.float16):
        with wide(torch.bfloat16):
            assert (X @ X).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert (X @ X).dtype is torch.bfloat16
        assert (X @ X).dtype is torch.float16
    assert spy.replaced == [torch.bfloat16, torch.bfloat16, torch.float16]


def test_native_inside_float32_is_obeyed(spy: Spy) -> None:
    """A scope that asks for native arithmetic inside one that does not has it."""
    with wide():
        with autocast("cpu", arithmetic="native"):
            _ = X @ X
        assert spy.replaced == []
        _ = X @ X
    assert spy.replaced == [torch.float16]


def test_nested_scopes_share_one_mode() -> None:
    """However deep the scopes, an operator passes one mode."""
    stack = []
    with wide(), wide(torch.bfloat16), wide():
        stack = [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, _mode._Mode)]
    assert len(stack) == 1


def test_left_after_an_exception() -> None:
    """An error in the body leaves no mode and no setting."""
    with pytest.raises(RuntimeError, match="shape"), wide():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_any_mode_on()


def test_an_operator_that_fails_leaves_autocast_on() -> None:
    """Where the float32 operator raises, autocast is on again for what follows in the scope."""
    with wide():
        with pytest.raises(RuntimeError, match="shape"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert (X @ X).dtype is torch.float16


def test_pytorchs_own_scope_is_pytorchs(spy: Spy) -> None:
    """In ``torch.autocast`` outside ours no mode is on, and nothing is replaced."""
    with torch.autocast("cpu", torch.float16):
        assert not is_any_mode_on()
        _ = X @ X
    assert spy.replaced == []


def test_nothing_of_pytorch_is_replaced() -> None:
    """Importing, entering and leaving changes no attribute of torch that an operator is called by."""
    places = (torch, torch.nn.functional, torch.Tensor, torch.overrides, torch.autograd, torch.amp)
    before = [dict(vars(place)) for place in places]
    with wide():
        nn.TransformerEncoderLayer(8, 2, 8)(torch.ones(1, 2, 8)).sum().backward()
    for place, was in zip(places, before, strict=True):
        now = vars(place)
        assert [name for name in was if now.get(name) is not was[name]] == []


def test_the_state_is_the_threads(spy: Spy) -> None:
    """Another thread is in no scope; two threads in two scopes each have their own dtype and copies."""
    found: list[Any] = []

    def outside() -> None:
        found.append((is_any_mode_on(), (X @ X).dtype))

    def inside() -> None:
        with wide(torch.bfloat16):
            found.append((X @ X).dtype)

    with wide(torch.float16):
        for work in (outside, inside):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        found.append((X @ X).dtype)
    assert found == [(False, torch.float32), torch.bfloat16, torch.float16]


def test_many_threads_at_once() -> None:
    """Eight threads that train small nets in one shared scope get the gradients of one thread alone."""
    scope = wide()

    def train(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(8, 8, generator=generator).requires_grad_()
        x = torch.randn(8, 8, generator=generator)
        for _ in range(5):
            with scope:
                loss = (x @ weight).float().square().mean()
            loss.backward()
        assert weight.grad is not None
        return weight.grad

    expected = [train(n) for n in range(8)]
    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: train(n)})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], expected[n]) for n in range(8))


def test_backward_inside_the_scope_is_that_outside() -> None:
    """A backward inside the scope computes in float32 as it does outside."""

    def slope(inside: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        with wide():
            loss = model(torch.randn(3, 4)).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    assert torch.equal(slope(True), slope(False))


def test_another_mode_sees_what_is_left_to_pytorch() -> None:
    """A mode that the user turns on inside the scope still sees each operator first."""
    seen: list[str] = []

    class Mine(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with wide(), Mine():
        assert (X @ X).dtype is torch.float16
    assert seen[0] == "matmul"


def test_subclasses_are_asked_themselves() -> None:
    """A tensor subclass is handed to itself, not taken for an ordinary tensor."""

    class Odd(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "mine" if func is torch.matmul else super().__torch_function__(func, types, args, kwargs or {})

    with wide():
        assert torch.matmul(torch.ones(2, 2).as_subclass(Odd), torch.ones(2, 2)) == "mine"


def test_sparse_and_meta_tensors_are_pytorchs() -> None:
    """What is sparse, or on no device, is computed as PyTorch does."""
    with wide():
        assert torch.mm(torch.eye(2).to_sparse(), torch.eye(2)).shape == (2, 2)
        assert torch.mm(torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta")).device.type == "meta"


def test_a_compiled_part_inside_the_scope() -> None:
    """A whole graph inside the scope compiles, casts, and gives gradients."""
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4)
    with wide():
        out = compiled(x)
    assert out.dtype is torch.float16
    out.float().sum().backward()
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(4, 4), rtol=1e-2, atol=1e-2)


def test_distributed_data_parallel() -> None:
    """A model in DDP has the gradients that it has alone; its hooks see float32."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        x = torch.randn(3, 4)
        with wide():
            loss = model(x).float().sum()
        loss.backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with wide():
            loss = nn.parallel.DistributedDataParallel(model)(x).float().sum()
        loss.backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    finally:
        torch.distributed.destroy_process_group()


WITHOUT = """
import sys
sys.modules["lucid.amp._half"] = None
import torch, lucid.amp
from lucid.amp import autocast
x = torch.ones(2, 2, requires_grad=True)
for asked in ("auto", "native", "float32"):
    scope = autocast("cpu", arithmetic=asked)
    with scope:
        assert (x @ x).dtype is torch.float16
        assert not torch.overrides.has_torch_function((x,))
    assert scope.arithmetic == "native", scope.arithmetic
try:
    autocast("cpu", flush_subnormals=True)
except RuntimeError as error:
    assert "lucid.amp._half" in str(error)
else:
    raise SystemExit("not refused")
"""


def test_without_the_folder() -> None:
    """Where ``_half`` cannot be imported ``autocast`` is right and says so; what cannot be had is refused."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
