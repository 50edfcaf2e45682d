"""What a forward depends on besides its inputs and weights, kept so that it can be run again.

Knows the random state of PyTorch and of Python's ``random``, the autocast that was in force, and a module's
buffers and attributes. Refuses to know why somebody wants to run a forward again. It reads nothing from a
device but, on an accelerator, its generator's state, which lives on the host.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

try:
    from lucid.amp._half import _mode
except ImportError:  # then every autocast computes as PyTorch does
    _mode = None  # type: ignore[assignment]


class Surroundings:
    """The random state and the autocast of this moment, for tensors on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = _random_state(device)
        enabled = torch.is_autocast_enabled(device.type)
        self._autocast = (enabled, torch.get_autocast_dtype(device.type) if enabled else None)
        self._arithmetic = _mode.thread.settings[-1] if _mode is not None and _mode.is_on() else None

    @property
    def in_float16(self) -> bool:
        """Whether autocast was choosing float16."""
        return self._autocast[1] is torch.float16

    def random_state(self) -> dict[str, Any]:
        """The random state under the names of the functions that set it."""
        python, cpu, accelerator = self._random
        return {
            "random.setstate": python,
            "torch.set_rng_state": cpu,
            f"{self._device.type}.set_rng_state": accelerator,
        }

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Be in them again; afterwards the present random state is what it was.

        Weights are not kept in autocast's cache: a copy made without gradients would be used by the next
        forward of an autocast that is still open.
        """
        present = _random_state(self._device)
        enabled, dtype = self._autocast
        _set_random_state(self._device, self._random)
        try:
            with (
                _in_arithmetic(self._arithmetic),
                torch.autocast(self._device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
            ):
                yield
        finally:
            _set_random_state(self._device, present)


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


def _random_state(device: torch.device) -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state(), _generator_state(device)


def _set_random_state(device: torch.device, state: tuple[Any, ...]) -> None:
    python, cpu, accelerator = state
    random.setstate(python)
    torch.set_rng_state(cpu)
    if accelerator is not None:
        module: Any = torch.get_device_module(device)
        arguments = () if device.type == "mps" else (device,)
        module.set_rng_state(accelerator, *arguments)


def _generator_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's own generator; None on the CPU, and while a CUDA graph is captured."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return None
    state: torch.Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


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
