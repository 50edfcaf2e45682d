"""The scope in which PyTorch chooses half precision: entered, left, entered again, decorated, compiled."""

import asyncio
import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from releases import RELEASE
from torch import nn

import lucid
from lucid.amp import autocast

State = tuple[bool, torch.dtype, bool]


def state(device: str = "cpu") -> State:
    """Everything that a scope changes."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


OUTSIDE = state()
INSIDE = (True, torch.float16, True)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test PyTorch's state, and its stack of modes, are as before."""
    yield
    assert state() == OUTSIDE
    assert not torch.overrides.has_torch_function((torch.ones(1),))


@pytest.fixture
def scope() -> autocast:
    """A float16 scope on the processor."""
    return autocast("cpu")


def test_is_a_torch_autocast(scope: autocast) -> None:
    """``autocast`` is PyTorch's class, so that what asks with isinstance believes it."""
    assert isinstance(scope, torch.autocast)
    assert lucid.autocast is autocast


def test_signature() -> None:
    """The first four parameters are the contract's, and what is more is keyword-only."""
    parameters = inspect.signature(autocast).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert positional == {
        "device_type": "metal",
        "dtype": torch.float16,
        "enabled": True,
        "cache_enabled": None,
    }
    keywords = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {"arithmetic": "auto", "flush_subnormals": False}


def test_metal_is_the_machines_accelerator() -> None:
    """Without arguments the scope is that of the device that ``lucid.device("metal")`` names."""
    assert autocast().device == lucid.device("metal").type


@pytest.mark.parametrize("index", ["", ":0"])
def test_device_type_may_be_a_device(device: torch.device, index: str) -> None:
    """A ``torch.device``, with an index or without, is taken as well as its name."""
    given = torch.device(f"{device.type}{index}")
    with autocast(given):
        assert state(device.type)[:2] == INSIDE[:2]


def test_dtype_none_is_pytorchs_choice(device: torch.device) -> None:
    """``dtype=None`` is what ``torch.autocast`` takes on that device."""
    assert autocast(device, None).fast_dtype == torch.autocast(device.type).fast_dtype


def test_unknown_device_is_pytorchs_error() -> None:
    """A device without autocast is refused in PyTorch's words, which name it."""
    with pytest.raises(RuntimeError, match="meta"):
        autocast("meta")


def test_unknown_arithmetic_is_refused() -> None:
    """A word that is none of the three is refused with the three."""
    with pytest.raises(ValueError, match=r"'fast'.*'auto', 'native', 'float32'"):
        autocast("cpu", arithmetic="fast")


def test_operators_are_cast_and_weights_stay_float32(device: torch.device) -> None:
    """Matrices are multiplied in half precision; parameters and their gradients are float32."""
    model = nn.Linear(4, 3).to(device)
    with autocast(device):
        out = model(torch.ones(2, 4, device=device))
    assert out.dtype is torch.float16
    out.float().sum().backward()
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == [torch.float32] * 2


def test_pytorchs_lists_hold(device: torch.device) -> None:
    """An operator has the dtype that ``torch.autocast`` gives it: half, float32 or its inputs'."""
    x = torch.rand(4, 4, device=device) + 0.5

    def dtypes(context: torch.autocast) -> list[torch.dtype]:
        with context:
            made = [x @ x, x + x, torch.mv(x, x[0]), nn.functional.mse_loss(x @ x, x), (x @ x).softmax(-1)]
        return [t.dtype for t in made]

    assert dtypes(autocast(device)) == dtypes(torch.autocast(device.type, torch.float16))


def test_disabled_keeps_every_dtype(scope: autocast) -> None:
    """``enabled=False`` inside a scope is obeyed, and the scope is there again afterwards."""
    x = torch.ones(2, 2)
    with scope:
        with autocast("cpu", enabled=False):
            assert (x @ x).dtype is torch.float32
            assert not autocast.is_autocast_enabled()
        assert (x @ x).dtype is torch.float16


def test_active_state_can_be_asked(scope: autocast) -> None:
    """The static methods tell what is in force now, also inside PyTorch's own scope."""
    assert not autocast.is_autocast_enabled("cpu")
    with scope:
        assert autocast.is_autocast_enabled()
        assert autocast.get_autocast_dtype() is torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            assert autocast.get_autocast_dtype() is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert not autocast.is_autocast_enabled()


def test_a_named_device_can_be_asked(device: torch.device) -> None:
    """Asked of a device by name, the answer is that device's."""
    with autocast(device, torch.bfloat16 if device.type == "cpu" else torch.float16):
        assert autocast.is_autocast_enabled(device)
        assert autocast.get_autocast_dtype(device.type) is torch.get_autocast_dtype(device.type)


def test_cache_is_as_asked() -> None:
    """``cache_enabled`` is in force inside, and what was there is there afterwards."""
    with autocast("cpu", cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
        with autocast("cpu"):
            assert not torch.is_autocast_cache_enabled()


def test_restores_when_the_body_raises(scope: autocast) -> None:
    """An error passes through, and the state before is back."""
    with autocast("cpu", torch.bfloat16, cache_enabled=False):
        before = state()
        with pytest.raises(KeyError, match="seven"), scope:
            raise KeyError("seven")
        assert state() == before


def test_one_instance_nested(scope: autocast) -> None:
    """One instance entered inside itself is left twice, and between as it should be."""
    with autocast("cpu", torch.bfloat16):
        with scope:
            with torch.autocast("cpu", enabled=False), scope:
                assert state() == INSIDE
            assert state() == INSIDE
        assert state()[1] is torch.bfloat16


def test_one_instance_in_two_threads(scope: autocast) -> None:
    """One instance is entered by a thread while another is in it, and each is left with what it had."""
    other_is_in, other_may_leave = threading.Event(), threading.Event()
    found: list[State] = []

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with scope:
                other_is_in.set()
                other_may_leave.wait(10)
            found.append(state())

    thread = threading.Thread(target=work)
    with scope:
        thread.start()
        assert other_is_in.wait(10)
    assert state() == OUTSIDE
    other_may_leave.set()
    thread.join()
    assert found == [(True, torch.bfloat16, True)]


def test_left_where_it_was_not_entered(scope: autocast) -> None:
    """Leaving in a thread that did not enter is refused, and changes nothing."""
    with pytest.raises(RuntimeError, match="enter it there first"):
        scope.__exit__(None, None, None)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_work(scope: autocast, make: Callable[[autocast], autocast]) -> None:
    """A copied or pickled scope is entered as the first one is."""
    with scope, make(scope):
        assert state() == INSIDE


def test_decorated_function(scope: autocast) -> None:
    """A function's body runs in the scope, and it keeps its name and its result."""

    @scope
    def body(x: int, *, y: int) -> tuple[int, State]:
        """Its words."""
        return x + y, state()

    assert (body.__name__, body.__doc__) == ("body", "Its words.")
    assert body(1, y=2) == (3, INSIDE)


def test_decorated_recursion(scope: autocast) -> None:
    """A decorated function may call itself."""

    @scope
    def down(n: int) -> int:
        return 0 if n == 0 else 1 + down(n - 1)

    assert down(5) == 5


def test_decorating_what_cannot_be_called(scope: autocast) -> None:
    """What is no function is refused, and named; so is a function where the device belongs."""
    with pytest.raises(TypeError, match=r"callable.*got 3"):
        scope(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"@autocast\(\)"):
        autocast(lambda x: x)  # type: ignore[arg-type]


def test_decorated_generator(scope: autocast) -> None:
    """A generator has the scope while it runs, not while it waits; values, errors and results go through."""
    seen: list[Any] = []

    @scope
    def body() -> Iterator[str]:
        seen.append((state(), (yield "first")))
        try:
            yield "second"
        except KeyError as error:
            seen.append((state(), error.args))
        yield "third"
        return "result"

    assert inspect.isgeneratorfunction(body)
    running: Any = body()
    assert (next(running), state()) == ("first", OUTSIDE)
    assert (running.send("sent"), state()) == ("second", OUTSIDE)
    assert (running.throw(KeyError("thrown")), state()) == ("third", OUTSIDE)
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == "result"
    assert seen == [(INSIDE, "sent"), (INSIDE, ("thrown",))]


def test_decorated_generator_closed(scope: autocast) -> None:
    """Closing a generator runs its ``finally`` in the scope."""
    seen: list[State] = []

    @scope
    def body() -> Iterator[int]:
        try:
            yield 1
        finally:
            seen.append(state())

    running = body()
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert seen == [INSIDE]


def test_decorated_generator_raises(scope: autocast) -> None:
    """An error of a generator comes out as itself, with the scope left."""

    @scope
    def body() -> Iterator[int]:
        yield 1
        raise KeyError("own")

    running = body()
    next(running)
    with pytest.raises(KeyError, match="own"):
        next(running)
    assert state() == OUTSIDE


def test_two_generators_in_turn() -> None:
    """Two generators with different scopes, taken in turn, each see their own."""

    def body() -> Iterator[torch.dtype]:
        for _ in range(3):
            yield torch.get_autocast_dtype("cpu")

    first, second = autocast("cpu", torch.float16)(body)(), autocast("cpu", torch.bfloat16)(body)()
    assert list(zip(first, second, strict=True)) == [(torch.float16, torch.bfloat16)] * 3


def test_decorated_coroutine(scope: autocast) -> None:
    """Two coroutines that wait for each other have the scope only while their own body runs."""
    seen: list[State] = []

    @scope
    async def inside() -> str:
        for _ in range(3):
            seen.append(state())
            await asyncio.sleep(0)
        return "result"

    async def outside() -> list[State]:
        found = []
        for _ in range(3):
            await asyncio.sleep(0)
            found.append(state())
        return found

    async def both() -> list[Any]:
        return await asyncio.gather(inside(), outside())

    assert inspect.iscoroutinefunction(inside)
    assert asyncio.run(both()) == ["result", [OUTSIDE] * 3]
    assert seen == [INSIDE] * 3


def test_decorated_coroutine_cancelled(scope: autocast) -> None:
    """A cancelled coroutine cleans up in the scope, and the scope is left."""
    seen: list[State] = []

    @scope
    async def inside() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(state())

    async def cancel() -> None:
        task = asyncio.ensure_future(inside())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert seen == [INSIDE]


def test_decorated_async_generator(scope: autocast) -> None:
    """An async generator has the scope while it runs: sent to, thrown into, closed."""
    seen: list[Any] = []

    @scope
    async def body() -> AsyncIterator[int]:
        try:
            seen.append((yield 1))
            await asyncio.sleep(0)
            try:
                yield 2
            except KeyError:
                seen.append(state())
            yield 3
        finally:
            await asyncio.sleep(0)
            seen.append(state())

    async def drive() -> None:
        running: Any = body()
        assert (await running.asend(None), state()) == (1, OUTSIDE)
        assert (await running.asend("sent"), state()) == (2, OUTSIDE)
        assert (await running.athrow(KeyError()), state()) == (3, OUTSIDE)
        await running.aclose()

    assert inspect.isasyncgenfunction(body)
    asyncio.run(drive())
    assert seen == ["sent", INSIDE, INSIDE]


def test_decorated_async_generator_runs_out(scope: autocast) -> None:
    """``async for`` over a decorated async generator ends where its body ends."""

    @scope
    async def body() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def collect() -> list[int]:
        return [n async for n in body()]

    assert asyncio.run(collect()) == [1, 2]


def built_inside(x: torch.Tensor) -> torch.Tensor:
    """A scope made by the compiled function."""
    with autocast("cpu"):
        return x @ x


def with_metal(x: torch.Tensor) -> torch.Tensor:
    """A scope by its default name, and the active state."""
    with autocast():
        return x @ x if autocast.is_autocast_enabled() else x


def decorated_inside(x: torch.Tensor) -> torch.Tensor:
    """A scope made as a decorator by the compiled function."""

    @autocast("cpu")
    def product(y: torch.Tensor) -> torch.Tensor:
        return y @ y

    return product(x)


SCOPE = autocast("cpu")


def given(x: torch.Tensor) -> torch.Tensor:
    """A scope that was there before."""
    with SCOPE:
        return x @ x


@SCOPE
def decorated(x: torch.Tensor) -> torch.Tensor:
    """A scope as a decorator."""
    return x @ x


MADE_INSIDE = pytest.mark.skipif(
    RELEASE < (2, 12),
    reason="below 2.12 the compiler cannot tell the type of a torch.autocast that it makes",
)


@pytest.mark.parametrize(
    "function",
    [given, decorated, *(pytest.param(f, marks=MADE_INSIDE) for f in (built_inside, decorated_inside, with_metal))],
    ids=lambda f: f.__name__,
)
def test_compiles_whole(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """With ``fullgraph=True`` a scope in a function is one graph, and casts."""
    if function is with_metal and autocast().device != "cpu":
        pytest.skip("here the default scope is not the processor's")
    x = torch.rand(4, 4)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert compiled(x).dtype is torch.float16
    torch.testing.assert_close(compiled(x), function(x), rtol=2e-3, atol=0)


def test_compiled_function_inside_a_scope(scope: autocast) -> None:
    """A whole graph called inside a scope casts as its body would."""
    compiled = torch.compile(lambda x: x @ x, fullgraph=True, backend="eager")
    x = torch.rand(4, 4)
    with autocast("cpu", arithmetic="float32"):
        assert compiled(x).dtype is torch.float16
    assert compiled(x).dtype is torch.float32


def test_a_compiled_function_refuses_what_is_no_arithmetic() -> None:
    """With the same error as when it is not compiled."""

    def product(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", arithmetic="exact"):
            return x @ x

    with pytest.raises(ValueError, match="arithmetic is 'exact'"):
        torch.compile(product, backend="eager")(torch.ones(2, 2))


def test_exporting_a_scope_inside_itself_leaves_nothing_behind() -> None:
    """Each way out restores what was in force before the matching way in, also while a graph is exported."""

    class Nested(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with SCOPE:
                with SCOPE:
                    y = x @ x
                return y, y @ x

    before = state()
    exported = torch.export.export(Nested(), (torch.ones(2, 2),), strict=False)
    assert state() == before
    assert [y.dtype for y in exported.module()(torch.ones(2, 2))] == [torch.float16] * 2


def test_a_graph_that_breaks_inside_the_scope() -> None:
    """Where a graph breaks inside the scope the function still gives what it gives uncompiled."""

    def broken(x: torch.Tensor) -> tuple[torch.Tensor, State]:
        with autocast("cpu"):
            y = x @ x
            print(end="")
            return y @ y, state()

    y, found = torch.compile(broken, backend="eager")(torch.ones(2, 2))
    assert (y.dtype, found) == (torch.float16, INSIDE)


def test_import_does_not_load_the_compiler() -> None:
    """``import lucid.amp`` pays nothing for the compiler that most programs never use."""
    asked = "import sys, lucid.amp; lucid.amp.autocast('cpu'); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", asked], check=False).returncode == 0


def test_the_scope_is_left_by_an_exception_of_the_operator(scope: autocast) -> None:
    """An operator that refuses its shapes leaves nothing behind."""
    with pytest.raises(RuntimeError, match="shape"), scope:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert state() == OUTSIDE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("asked", ["auto", "native", "float32"])
def test_a_gpu_is_always_native(asked: str) -> None:
    """On a GPU the arithmetic is native whatever was asked, and no mode is turned on."""
    scope = autocast("cuda", arithmetic=asked)
    assert scope.arithmetic == "native"
    with scope:
        assert not torch.overrides.has_torch_function((torch.ones(1),))
