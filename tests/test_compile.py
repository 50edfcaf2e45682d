"""The scaler under ``torch.compile`` and in CUDA graphs: the scale moves, the graph stays."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import Linear, Parameter

from lucid.amp import GradScaler, autocast


@pytest.fixture
def counter() -> CompileCounter:
    """A compiler's back end that counts its graphs, with nothing compiled before."""
    torch.compiler.reset()
    return CompileCounter()


def test_forward_and_scale_are_one_graph_that_follows_the_scale(counter: CompileCounter) -> None:
    """No graph break, and no second graph while the scale moves, from the very first call on."""
    model, scaler = Linear(3, 1), GradScaler(4.0)
    compiled = torch.compile(lambda x: scaler.scale(model(x).sum()), fullgraph=True, backend=counter)
    x = torch.randn(4, 3)
    for scale in (4.0, 8.0, 3.0, 0.5):
        torch.testing.assert_close(compiled(x), model(x).sum() * scaler.get_scale())
        scaler.update(2 * scale if scale == 4.0 else {8.0: 3.0, 3.0: 0.5}.get(scale))
    assert counter.frame_count == 1


def test_the_gradients_of_a_compiled_step_are_scaled(counter: CompileCounter) -> None:
    """Backward through the compiled loss gives gradients that unscale to the plain ones, at each scale."""
    model, scaler = Linear(3, 1), GradScaler(4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = torch.compile(lambda x: scaler.scale(model(x).sum()), fullgraph=True, backend=counter)
    x = torch.randn(4, 3)
    for scale in (4.0, 1024.0, 2.0**-8):
        scaler.update(scale)
        optimizer.zero_grad()
        compiled(x).backward()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(model.weight.grad, x.sum(0, keepdim=True))
        scaler.step(optimizer)
        scaler.update()
    assert counter.frame_count == 1


def test_under_autocast_and_over_a_structure(counter: CompileCounter) -> None:
    """The scope and a dict of losses are traced whole, a half loss scaled in float32."""
    model, scaler = Linear(3, 2), GradScaler(65536.0)
    scope = autocast("cpu", dtype=torch.bfloat16, arithmetic="native")

    def step(x: Tensor) -> dict[str, Tensor]:
        with scope:
            out = model(x)
        return scaler.scale({"mean": out.float().mean(), "half": out.sum().half()})

    scaled = torch.compile(step, fullgraph=True, backend=counter)(torch.randn(4, 3))
    assert {key: value.dtype for key, value in scaled.items()} == {"mean": torch.float32, "half": torch.float32}
    assert counter.frame_count == 1


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch cannot trace backward()"
)
def test_backward_is_traced_too(counter: CompileCounter) -> None:
    """With trace_autograd_ops one graph holds forward, scale and backward, and follows the scale."""
    model, scaler = Linear(3, 1), GradScaler(4.0)

    def step(x: Tensor) -> Tensor:
        loss = scaler.scale(model(x).sum())
        loss.backward()
        return loss.detach()

    x = torch.randn(4, 3)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend=counter)
        for scale in (4.0, 8.0, 16.0):
            scaler.update(scale)
            model.zero_grad()
            compiled(x)
            torch.testing.assert_close(model.weight.grad, x.sum(0, keepdim=True) * scale)
    assert counter.frame_count == 1


def test_two_scalers_through_one_function_keep_their_scales(counter: CompileCounter) -> None:
    """A graph made for one scaler is not used for another with its scale."""
    compiled = torch.compile(lambda scaler, x: scaler.scale(x.sum()), fullgraph=True, backend=counter)
    x = torch.ones(3)
    first, second = GradScaler(4.0), GradScaler(8.0)
    assert [compiled(scaler, x).item() for scaler in (first, second, first, GradScaler(16.0))] == [12, 24, 12, 48]


def test_what_else_the_scaler_does_makes_no_other_graph(counter: CompileCounter) -> None:
    """The scale as a float64, which divides at 3, and on another device: neither is compiled code's concern."""
    scaler, x = GradScaler(3.0), torch.ones(3)
    compiled = torch.compile(lambda x: scaler.scale(x.sum()), fullgraph=True, backend=counter)
    assert compiled(x).item() == 9.0
    parameter = Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, 6.0)
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    scaler.update()
    assert parameter.item() == -2.0
    scaler.scale(torch.ones((), device="meta"))
    assert compiled(x).item() == 9.0
    assert counter.frame_count == 1


def test_outputs_on_several_devices_are_one_graph(counter: CompileCounter) -> None:
    """The factors of all devices are there before the compiler looks for the first one."""
    scaler = GradScaler(3.0)
    compiled = torch.compile(lambda *outputs: scaler.scale(outputs), fullgraph=True, backend=counter)
    for scale in (3.0, 6.0):
        here, there = compiled(torch.ones(2), torch.ones(2, device="meta"))
        assert (here.tolist(), there.device.type) == ([scale] * 2, "meta")
        scaler.update(6.0)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_whole_iteration_inside_compiled_code_trains_as_outside(counter: CompileCounter) -> None:
    """Not one graph, but right, also when the scale moves: x loses lr · 2x = a fifth each time."""
    x = torch.ones(2, requires_grad=True)
    scaler, optimizer = GradScaler(4.0, growth_interval=1), torch.optim.SGD([x], lr=0.1)

    @torch.compile(backend=counter)
    def iteration() -> None:
        optimizer.zero_grad()
        scaler.scale((x * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for steps in (1, 2, 3):
        iteration()
        torch.testing.assert_close(x.detach(), torch.full((2,), 0.8**steps))
    assert scaler.get_scale() == 32.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: its graphs")
def test_a_captured_backward_follows_the_scale() -> None:
    """Scaling and backward are captured once and replayed while the scale moves: each gradient is the scale."""
    parameter, scaler = Parameter(torch.ones(3, device="cuda")), GradScaler(4.0)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        scaler.scale(parameter.sum()).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        scaler.scale(parameter.sum()).backward()
    for scale in (4.0, 8.0, 0.5):
        scaler.update(scale)
        graph.replay()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [scale] * 3
        scaler.step(optimizer)
        assert parameter.grad.tolist() == [1.0] * 3
        scaler.update()
        parameter.grad.zero_()


class Scaled(torch.nn.Module):
    """A module that returns a scaled sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = GradScaler(4.0)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the sum."""
        scaled: Tensor = self.scaler.scale(x.sum())
        return scaled


def test_an_exported_loss_is_no_loss_of_the_iteration() -> None:
    """Traced without the compiler, 4 · (2 + 2 + 2) = 24 comes out, and nothing of the trace is remembered."""
    module = Scaled()
    exported = torch.export.export(module, (torch.ones(3),), strict=False)
    assert exported.module()(torch.full((3,), 2.0)).item() == 24.0
    assert len(module.scaler._scaled) == 0
