"""How often the host reads a tensor's value, and how often it waits for a CUDA device.

Knows every way to read one: a dispatch mode sees the one operator that ``item``, ``bool`` and ``float`` go through, and
``tolist`` and ``numpy`` are watched beside it. On CUDA PyTorch itself tells each wait.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):
    """Counts the values that the host reads inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operator that reads a scalar; run everything."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[Reads]:
    """Count reads, those by ``tolist`` and ``numpy`` too, which pass the dispatcher by."""
    with Reads() as reads, ExitStack() as stack:
        for name in ("tolist", "numpy", "__array__"):
            stack.enter_context(mock.patch.object(Tensor, name, counting(reads, getattr(Tensor, name))))
        yield reads


def counting(reads: Reads, original: Callable[..., Any]) -> Callable[..., Any]:
    """The method, counted once, whatever it reads inside."""

    def method(*args: Any, **kwargs: Any) -> Any:
        before = reads.count
        result = original(*args, **kwargs)
        reads.count = before + 1
        return result

    return method


@contextmanager
def waits(most: int) -> Iterator[None]:
    """At most so many waits of the host for a device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [str(one.message) for one in caught if "synchronizing" in str(one.message)]
    assert len(found) <= most, found
