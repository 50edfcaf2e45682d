"""What ``"metal"`` means on this machine, and who is taught it.

Knows which device the name stands for, how ``Tensor.to`` and ``Module.to`` come to understand it, and which
functions of torch understand it when they are looked up in ``lucid``. Refuses to know everything else about a
device: what is sent to ``"metal"`` lives on the real device, and nothing here is asked about it again.

Importing this file teaches nothing; :func:`teach` does.
"""

import threading
from collections.abc import Callable
from functools import cache, update_wrapper, wraps
from typing import Any

import torch

from lucid._warning import warn

NAME = "metal"

# fmt: off
CREATION = frozenset((
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like",
    "empty_permuted", "empty_quantized", "empty_strided", "eye", "from_dlpack", "from_file", "full",
    "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "range", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor",
    "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
))
# fmt: on
"""The functions of torch that make a tensor and take ``device=``."""

TAUGHT = CREATION | {"device", "load"}
"""The names that understand ``"metal"``, and teach, when they are looked up in ``lucid``."""

_lock = threading.Lock()
_cpu_was_said = False


def real_device(spec: Any) -> Any:
    """Return the device that ``"metal"`` or ``"metal:<index>"`` names; hand anything else back as it came.

    The name stands for Apple's GPU (``mps``) where there is one, otherwise for the machine's accelerator,
    otherwise for the CPU, with one warning a process that says so.

    Raises:
        RuntimeError: for a malformed name (``"metal:x"``), and for an index other than 0 where the name is
            the CPU. PyTorch itself refuses an index that a machine with an accelerator lacks.
    """
    if not _is_name(spec):
        return spec
    index, kind = _index(spec), _accelerator()
    if kind == "cpu" and index:
        raise RuntimeError(f'{spec!r} was asked for, but "{NAME}" is the CPU here: write "{NAME}"')
    if kind == "cpu" or index is None:
        return torch.device(kind)
    return torch.device(kind, index)


def device_type(device_type: str | torch.device) -> str:
    """Return the type of device that autocast is for; ``"metal"`` becomes ``"mps"``, ``"cuda"`` or ``"cpu"``.

    Raises:
        RuntimeError: as :func:`real_device` does.
    """
    real = real_device(device_type)
    return real.type if isinstance(real, torch.device) else real


def teach() -> None:
    """Teach ``Tensor.to`` and ``Module.to`` the name, once; for any other argument nothing changes."""
    with _lock:
        for owner in (torch.Tensor, torch.nn.Module):
            if not isinstance(owner.__dict__.get("to"), To):
                setattr(owner, "to", To(owner.to, owner))  # noqa: B010 - a type checker may not know of it


def taught(name: str) -> Any:
    """Return what ``lucid.<name>`` is, for a name in :data:`TAUGHT`.

    Raises:
        AttributeError: when this PyTorch lacks the name.
    """
    own = {"device": device, "load": load}.get(name)
    return own or _with_device(getattr(torch, name))


class To:
    """``Tensor.to`` or ``Module.to`` that understands the name, and is the original to whoever compares.

    PyTorch hands ``torch.Tensor.to`` to ``__torch_function__``, to modes and to tables keyed by it: lazy
    parameters, for one, allow ``to`` and little else. So this equals and hashes as the original, and pickles
    by its name as the original does.
    """

    # Apart from __dict__, which functools.wraps copies to whoever wraps this.
    __slots__ = ("__dict__", "_function", "_original", "_owner")

    def __init__(self, original: Callable[..., Any], owner: type) -> None:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Call the original, with the real device in the place of the name."""
            spec = args[0] if args else kwargs.get("device")
            if isinstance(spec, str) and spec.startswith(NAME):
                if args:
                    args = (real_device(spec), *args[1:])
                else:
                    kwargs["device"] = real_device(spec)
            return original(self, *args, **kwargs)

        self._original, self._owner = original, owner
        self._function: Any = update_wrapper(to, original)
        update_wrapper(self, original)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # By the function's own __get__, which torch.compile can trace; types.MethodType it cannot.
        return self._function.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(self._original == (other._original if isinstance(other, To) else other))

    def __hash__(self) -> int:
        return hash(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_original"), name)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, "to")


class _DeviceType(type):
    """Makes :class:`device` a stand-in: calling it gives a torch.device, and every torch.device is one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        names = [value for value in (*args, *kwargs.values()) if _is_name(value)]
        if not names:
            return torch.device(*args, **kwargs)
        _index(names[0])
        # PyTorch reads the arguments, with a device it knows in the place of the name.
        known = torch.device(*map(_known, args), **{key: _known(value) for key, value in kwargs.items()})
        return real_device(NAME if known.index is None else f"{NAME}:{known.index}")

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, torch.device)


class device(metaclass=_DeviceType):
    """``torch.device``, which understands ``"metal"`` too; what it makes are torch's own device objects."""


def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.load``, which understands ``"metal"`` too, as ``map_location`` or as a value in its mapping."""
    if isinstance(map_location, dict):
        map_location = {key: str(real_device(value)) for key, value in map_location.items()}
    return torch.load(f, real_device(map_location), *args, **kwargs)


@cache
def _with_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """The creation function, with ``device="metal"`` understood."""

    @wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        """Call the original, with the real device in the place of the name."""
        if _is_name(kwargs.get("device")):
            kwargs["device"] = real_device(kwargs["device"])
        return original(*args, **kwargs)

    # Where a pickle finds it again.
    create.__module__, create.__qualname__ = "lucid", original.__name__
    return create


def _is_name(spec: Any) -> bool:
    return isinstance(spec, str) and (spec == NAME or spec.startswith(f"{NAME}:"))


def _known(spec: Any) -> Any:
    return "cpu" + spec.removeprefix(NAME) if _is_name(spec) else spec


def _index(spec: str) -> int | None:
    """The index in ``"metal:<index>"``, as PyTorch reads it."""
    try:
        return torch.device(_known(spec)).index
    except RuntimeError:
        raise RuntimeError(f'Invalid device string: {spec!r}; write "{NAME}" or "{NAME}:0"') from None


def _accelerator() -> str:
    """The type of device that the name stands for; the first time that it is the CPU, it says so."""
    # torch.compile traces all of this but the question about mps, which the accelerator answers as well.
    if not torch.compiler.is_compiling() and torch.backends.mps.is_available():
        return "mps"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None:
        return found.type
    if not torch.compiler.is_compiling():
        _say_that_it_is_the_cpu()
    return "cpu"


def _say_that_it_is_the_cpu() -> None:
    global _cpu_was_said
    with _lock:
        said, _cpu_was_said = _cpu_was_said, True
    if said:
        return
    warn(f'"{NAME}" is the CPU on this machine, where PyTorch finds no GPU: everything works, at its speed')
