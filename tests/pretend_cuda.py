"""A stand-in for CUDA, so that what depends on a device is tried on machines that have none.

    PYTHONPATH=tests python -m pytest -p pretend_cuda --device cuda -k cuda

Builds ``pretend_cuda.cpp`` with the machine's C++ compiler, loads it before PyTorch, and makes ``torch.cuda`` answer as
it does where there are two devices. Knows nothing of what is tested, and nothing of speed: the memory is the host's.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".cpp")

BEYOND_IT = {
    "test_a_first_use_inside_a_capture_is_refused": "the stand-in captures no graphs",
    "test_pytorchs_lists_hold": "the stand-in lacks CUDA's softmax that widens its input",
}
"""The tests of what it has not."""


def built() -> Path:
    """Return the library, made unless it was made from this source for this PyTorch before."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.submodule_search_locations is not None
    torch = Path(found.submodule_search_locations[0])
    if list(torch.glob("lib/*torch_cuda*")):
        raise pytest.UsageError("-p pretend_cuda: this PyTorch has CUDA's own part; the stand-in needs a build without")
    made_of = SOURCE.read_bytes() + f"{importlib.metadata.version('torch')} in {torch}".encode()
    library = SOURCE.parent / "__pycache__" / f"pretend_cuda-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not library.exists():
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            raise pytest.UsageError("-p pretend_cuda: this machine has no C++ compiler; leave the option out")
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        link = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, *include, str(SOURCE), "-o", str(made), *link], check=True)
        made.replace(library)
    return library


if "torch" in sys.modules:
    raise pytest.UsageError("-p pretend_cuda: PyTorch was imported before; it asks once whether there is CUDA")
ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402


def set_sync_debug_mode(mode: str) -> None:
    """Let waits pass, warn or raise."""
    torch.ops.pretend_cuda.set_sync_debug_mode(["default", "warn", "error"].index(mode))


for name, answer in {
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "current_device": lambda: 0,
    "is_current_stream_capturing": lambda: False,
    "synchronize": lambda device=None: torch.ops.pretend_cuda.synchronize(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
    "manual_seed_all": lambda seed: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "set_sync_debug_mode": set_sync_debug_mode,
    "_initialized": True,
    "_lazy_init": lambda: None,
    "_exchange_device": lambda index: 0,
    "_maybe_exchange_device": lambda index: 0,
}.items():
    setattr(torch.cuda, name, answer)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of what it has not."""
    for item in items:
        reason = BEYOND_IT.get(getattr(item, "originalname", ""))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
