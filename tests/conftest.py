"""Where the tests run and how long they look.

Knows the devices of this machine (the ``device`` fixture, ``--device``), how many random examples Hypothesis
draws (``--long``), and how to do without PyTorch's private names (``--public-torch``). Knows nothing of what is
tested.

A Hypothesis test that wants more than the profile's examples multiplies them, so that ``--long`` reaches it
too: ``@settings(max_examples=20 * settings.default.max_examples)`` is 2,000 in CI, 200,000 with ``--long``.
"""

import os
import sys
from collections.abc import Iterator

import hidden
import pytest
import torch
from hypothesis import HealthCheck, settings

PRESENT = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}

# A time limit per example would measure whatever else the machine is doing.
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=100, derandomize=True, **QUIET)
settings.register_profile("long", max_examples=10_000, print_blob=True, **QUIET)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device`` (may be repeated; by default every device present), ``--long`` and ``--public-torch``."""
    parser.addoption("--device", action="append", choices=sorted(PRESENT), help="test on this device only")
    parser.addoption("--long", action="store_true", help="draw a hundred times as many random examples")
    parser.addoption("--public-torch", action="store_true", help="hide PyTorch's private names from the package")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples; refuse a device that is not there, which would test nothing."""
    for name in config.getoption("--device") or ():
        if not PRESENT[name]():
            raise pytest.UsageError(f"--device {name}: this machine has none; leave the option out")
    if config.getoption("--public-torch"):
        hidden.hide()
    settings.load_profile("long" if config.getoption("--long") else "ci")
    if config.getoption("--long"):
        config.option.timeout = 0.0  # pytest-timeout's word for none
    # Said once a process on a machine without an accelerator, to whichever test comes first.
    # tests/test_metal.py asserts it with pytest.warns.
    config.addinivalue_line("filterwarnings", 'ignore:"metal" is the CPU:UserWarning')
    # Said on CUDA by PyTorch's own modules when torch.compiler.reset imports them.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
    # Said once on CUDA by the first backward of a thread; PyTorch then makes the context that it misses.
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``device`` once for each device asked for, or for each that is present."""
    if "device" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--device")
        names = asked or [name for name, present in PRESENT.items() if present()]
        metafunc.parametrize("device", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device of this machine: the CPU always, CUDA and MPS where they are present."""
    return torch.device(request.param)


@pytest.fixture(params=["every dtype", "float32 alone"])
def operator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which dtypes there is a batched check-and-multiply: on some CUDA it is float32 alone."""
    from lucid.amp import _torch  # after the package's private names were hidden, if they are

    if request.param == "float32 alone":
        asked = _torch.check_and_multiply
        monkeypatch.setattr(
            _torch,
            "check_and_multiply",
            lambda device, dtype: asked(device, dtype) if dtype is torch.float32 else None,
        )


@pytest.fixture
def kernels_are_known(request: pytest.FixtureRequest) -> None:
    """Skip where PyTorch's private names are hidden: no kernel divides then."""
    if request.config.getoption("--public-torch"):
        pytest.skip("without PyTorch's private name no kernel is known to divide")


@pytest.fixture(autouse=True)
def untraced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let coverage pause in a test that runs alone: it may measure time, and would measure the tracer."""
    trace = sys.gettrace()
    if "COVERAGE_RUN" in os.environ and request.node.get_closest_marker("alone"):
        sys.settrace(None)
    yield
    sys.settrace(trace)
