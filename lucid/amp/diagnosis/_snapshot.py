"""What a forward depends on besides its inputs and weights, kept so that it can be run again.

Knows the random state of PyTorch and of Python's ``random``, the autocast that was in force, and a module's
buffers and attributes. Refuses to know why somebody wants to run a forward again. It reads nothing from a
device but, on an accelerator, its generator's state, which lives on the host.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

try:
    from lucid.amp._half import _mode
except ImportError:  # then every autocast computes as PyTorch does
    _mode = None  # type: ignore[assignment]


class Surroundings:
    """The random state and the autocast of this moment.

    Args:
        devices: those on which a forward computes.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._random = _random_state(devices)
        self._autocasts = {kind: _autocast(kind) for kind in {device.type for device in devices}}
        self._arithmetic = _mode.thread.settings[-1] if _mode is not None and _mode.is_on() else None

    @property
    def in_float16(self) -> bool:
        """Whether autocast was choosing float16."""
        return torch.float16 in self._autocasts.values()

    def random_state(self) -> dict[str, Any]:
        """The random state under the names of the functions that set it, with the device where there are several."""
        python, cpu, accelerators = self._random
        states = {f"{device}: set_rng_state": state for device, state in accelerators.items()}
        return {"random.setstate": python, "torch.set_rng_state": cpu, **states}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Be in them again; afterwards the present random state is what it was.

        Weights are not kept in autocast's cache: a copy made without gradients would be used by the next
        forward of an autocast that is still open.
        """
        present = _random_state(self._devices)
        _set_random_state(self._random)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_in_arithmetic(self._arithmetic))
                for kind, dtype in self._autocasts.items():
                    stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False))
                yield
        finally:
            _set_random_state(present)


def _autocast(kind: str) -> torch.dtype | None:
    """What autocast chooses on a kind of device; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextlib.contextmanager
def _in_arithmetic(settings: Any) -> Iterator[None]:
    """Compute half precision as lucid's autocast did there; as PyTorch does where it was not in force."""
    if settings is None:
        yield
        return
    _mode.enter(settings)
    try:
        yield
    finally:
        _mode.leave()


_RandomState = tuple[Any, torch.Tensor, dict[torch.device, torch.Tensor]]


def _random_state(devices: Sequence[torch.device]) -> _RandomState:
    states = {device: state for device in devices if (state := _generator_state(device)) is not None}
    return random.getstate(), torch.get_rng_state(), states


def _set_random_state(state: _RandomState) -> None:
    python, cpu, accelerators = state
    random.setstate(python)
    torch.set_rng_state(cpu)
    for device, generator in accelerators.items():
        module: Any = torch.get_device_module(device)
        module.set_rng_state(generator, *_place(device))


def _generator_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's own generator; None on the CPU, and while a CUDA graph is captured."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    module: Any = torch.get_device_module(device)
    state: torch.Tensor | None = module.get_rng_state(*_place(device)) if hasattr(module, "get_rng_state") else None
    return state


def _place(device: torch.device) -> tuple[torch.device, ...]:
    """The argument that names the device; ``torch.mps`` has one device and takes none."""
    return () if device.type == "mps" else (device,)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Inside, every buffer is a copy; afterwards buffers and every module's attributes are the objects they were.

    Hooks, and keys of a module's dicts, that were added or taken away in between are undone as well. What a
    forward appends to a list, or changes in a tensor that is no buffer, stays.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    tables = [(vars(module), dict(vars(module))) for module in modules]
    tables += [(value, dict(value)) for module in modules for value in vars(module).values() if isinstance(value, dict)]
    try:
        _copy_buffers(modules)
        yield
    finally:
        for table, content in tables:
            _put_back(table, content)


def _copy_buffers(modules: list[torch.nn.Module]) -> None:
    """Put a copy in each buffer's place: a graph that is still to run backward must not see the buffer change."""
    copies: dict[int, torch.Tensor] = {}
    for module in modules:
        for name, buffer in list(module.named_buffers(recurse=False)):
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            setattr(module, name, copies[id(buffer)])


def _put_back(table: dict[str, Any], content: dict[str, Any]) -> None:
    """Give a dict its old content, without touching one that did not change."""
    same = table.keys() == content.keys() and all(table[key] is value for key, value in content.items())
    if not same:
        table.clear()
        table.update(content)
