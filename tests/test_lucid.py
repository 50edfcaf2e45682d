"""The specification's names: its examples as written, what is torch's, what is ours, and what teaches."""

import copy
import doctest
import importlib
import importlib.metadata
import json
import pathlib
import pickle
import pkgutil
import re
import rlcompleter
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lucid
import lucid.nn
import lucid.optim
from lucid import _metal

# The specification's two examples, letter for letter.
EXAMPLE = """
>>> import lucid
>>> import lucid.nn as nn
>>> import lucid.optim as optim
>>> from lucid.amp import GradScaler, autocast
>>> model = nn.Linear(4, 1).to("metal")
>>> optimizer = optim.SGD(model.parameters(), lr=0.01)
>>> loss_fn = nn.MSELoss()
>>> dataloader = [
...     (lucid.randn(8, 4, device="metal"), lucid.randn(8, 1, device="metal"))
...     for _ in range(3)
... ]
>>> scaler = GradScaler()
>>> for x, y in dataloader:
...     optimizer.zero_grad()
...     with autocast():
...         out = model(x)
...     loss = loss_fn(out.float(), y)
...     scaler.scale(loss).backward()
...     scaler.step(optimizer)
...     scaler.update()
"""
CLIPPING_EXAMPLE = """
>>> from lucid.nn.utils import clip_grad_norm_
>>> x, y = dataloader[0]
>>> optimizer.zero_grad()
>>> scaler.scale(loss_fn(model(x), y)).backward()
>>> scaler.unscale_(optimizer)
>>> norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
>>> scaler.step(optimizer)
>>> scaler.update()
"""

OWN = {"amp", "nn", "optim", "GradScaler", "autocast"}


def statements(text: str) -> list[str]:
    """The statements of an interactive session."""
    return [example.source for example in doctest.DocTestParser().get_examples(text)]


def in_a_fresh_process(program: str, *options: str) -> str:
    """What a program prints that starts without any of this loaded; it must end well."""
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The examples


def trained_without_a_scaler(model: torch.nn.Linear, batches: list[Any], lands: list[bool]) -> dict[str, Any]:
    """The examples' steps in plain float32 PyTorch, of which some land; the fourth is clipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, ((x, y), landed) in enumerate(zip([*batches, batches[0]], lands, strict=True)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if number == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        if landed:
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("seed", range(5))
def test_the_examples_train_as_written(seed: int) -> None:
    """Statement for statement; the steps that land give what float32 without scaling gives."""
    names: dict[str, Any] = {}
    torch.manual_seed(seed)
    updates: list[lucid.amp.ScaleUpdate] = []
    for statement in statements(EXAMPLE + CLIPPING_EXAMPLE):
        exec(statement, names)
        if statement.startswith("model ="):
            plain = copy.deepcopy(names["model"])
        if statement.startswith("scaler ="):
            names["scaler"].register_update_hook(lambda scaler, update: updates.append(update))
    overflows = [update.overflow for update in updates]
    assert len(overflows) == 4
    assert names["scaler"].get_scale() == 2.0**16 * 0.5 ** sum(overflows)
    expected = trained_without_a_scaler(plain, names["dataloader"], [not overflow for overflow in overflows])
    # Three of the forward passes are in half precision: 11 bits of values near 1, times the learning rate.
    torch.testing.assert_close(names["model"].state_dict(), expected, atol=2e-4, rtol=0)
    assert names["model"].weight.dtype is torch.float32
    assert isinstance(names["norm"], torch.Tensor)


def test_the_examples_run_in_a_fresh_process() -> None:
    """Nothing but the examples' own imports is needed, and nothing but the CPU's warning is said."""
    program = "".join(statements(EXAMPLE + CLIPPING_EXAMPLE)) + "print(type(norm).__name__)"
    assert in_a_fresh_process(program, "-W", "error", "-W", 'ignore:"metal" is the CPU') == "Tensor\n"


# What is torch's


def test_every_other_public_name_is_torchs_by_identity() -> None:
    """All of ``dir(torch)`` but our own names and those that understand "metal"."""
    names = [name for name in dir(torch) if not name.startswith("_")]
    copies = [name for name in names if getattr(lucid, name) is not getattr(torch, name)]
    assert set(copies) == (OWN | _metal.TAUGHT) & set(names)
    assert len(names) > 900


@pytest.mark.parametrize("room", ["nn", "optim"])
def test_every_public_name_of_a_room_is_torchs_by_identity(room: str) -> None:
    """``lucid.nn.Linear is torch.nn.Linear``, and so are all the others."""
    ours, torchs = getattr(lucid, room), getattr(torch, room)
    assert ours is not torchs
    names = [name for name in dir(torchs) if not name.startswith("_")]
    assert len(names) > 15
    assert [name for name in names if getattr(ours, name) is not getattr(torchs, name)] == []


def submodules(package: types.ModuleType) -> list[str]:
    """The names of all modules inside a package, private ones too."""
    return [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("package", [torch.nn, torch.optim])
def test_every_submodule_imports_under_our_name_and_is_torchs(package: types.ModuleType) -> None:
    """``import lucid.nn.utils.rnn`` gives ``torch.nn.utils.rnn`` itself, and so for each; torch's stay as they were."""
    names = submodules(package)
    assert len(names) > 15
    for name in names:
        torchs = importlib.import_module(name)
        spec = torchs.__spec__
        assert importlib.import_module(name.replace("torch", "lucid", 1)) is torchs
        assert sys.modules[name] is torchs
        assert (torchs.__name__, torchs.__spec__) == (name, spec)


def test_submodules_import_in_every_form() -> None:
    """The forms of the import statement that programs use."""
    import lucid.nn.functional as F
    import lucid.nn.utils.rnn
    import lucid.optim.lr_scheduler as schedules
    from lucid.nn import functional, init
    from lucid.nn.attention import sdpa_kernel
    from lucid.nn.utils import clip_grad_norm_, parametrizations
    from lucid.optim.lr_scheduler import StepLR
    from lucid.optim.swa_utils import AveragedModel

    assert F is functional is torch.nn.functional
    assert lucid.nn.utils.rnn is torch.nn.utils.rnn
    assert schedules is torch.optim.lr_scheduler
    assert init is torch.nn.init
    assert sdpa_kernel is torch.nn.attention.sdpa_kernel
    assert clip_grad_norm_ is torch.nn.utils.clip_grad_norm_
    assert parametrizations is torch.nn.utils.parametrizations
    assert StepLR is torch.optim.lr_scheduler.StepLR
    assert AveragedModel is torch.optim.swa_utils.AveragedModel


@pytest.mark.parametrize("name", ["lucid.nn.nothing", "lucid.nn.utils.nothing", "lucid.optim.nothing.more"])
def test_a_submodule_that_torch_lacks_is_not_found(name: str) -> None:
    """The error names what was asked for, under the name that was used."""
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name.removesuffix('.more')}'"):
        importlib.import_module(name)


def test_an_import_in_a_fresh_process_loads_nothing_twice() -> None:
    """A submodule that torch has not loaded yet is loaded once, as torch's."""
    program = """
import sys, torch
assert "torch.nn.utils.prune" not in sys.modules
import lucid.nn.utils.prune as ours
import torch.nn.utils.prune as torchs
assert ours is torchs is sys.modules["lucid.nn.utils.prune"] is torch.nn.utils.prune
print(ours.__name__)
"""
    assert in_a_fresh_process(program) == "torch.nn.utils.prune\n"


@pytest.mark.parametrize("room", ["lucid", "lucid.nn", "lucid.optim"])
def test_a_star_import_gives_what_completion_shows(room: str) -> None:
    """``from lucid import *`` binds the public names; ``dir()`` shows them and the module's own attributes."""
    names: dict[str, Any] = {}
    exec(f"from {room} import *", names)
    module = sys.modules[room]
    shown = {name for name in dir(module) if not name.startswith("_")}
    bound = set(names) - {"__builtins__"}
    later = shown - bound
    assert bound <= shown
    assert len(bound) > 15
    assert all(isinstance(getattr(module, name), types.ModuleType) for name in later), "only what torch loads later"
    assert {"__doc__", "__name__", "__file__"} <= set(dir(module))
    assert dir(module) == sorted(dir(module))


def test_dir_leaves_out_what_torch_merely_imports() -> None:
    """``torch.os`` is a name of torch's, but nobody looks for it in ``lucid``."""
    assert "os" in dir(torch)
    assert not {"os", "sys", "torch", "warnings"} & set(dir(lucid))
    assert {"Tensor", "randn", "float16", "utils", "cuda"} | OWN <= set(dir(lucid))
    assert {"Linear", "functional", "utils"} <= set(dir(lucid.nn))
    assert {"SGD", "lr_scheduler"} <= set(dir(lucid.optim))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lucid.randn_l", "lucid.randn_like("),
        ("lucid.float1", "lucid.float16"),
        ("lucid.GradS", "lucid.GradScaler("),
        ("lucid.nn.LazyLin", "lucid.nn.LazyLinear("),
        ("lucid.optim.lr_s", "lucid.optim.lr_scheduler"),
        ("lucid.nn.utils.clip_grad_norm_", "lucid.nn.utils.clip_grad_norm_("),
    ],
)
def test_completion_offers_the_names(typed: str, offered: str) -> None:
    """Python's own completer finds them."""
    assert offered in rlcompleter.Completer({"lucid": lucid}).attr_matches(typed)


def test_models_pickle_as_pytorchs() -> None:
    """What is built through our names is written down under PyTorch's."""
    model = lucid.nn.Sequential(lucid.nn.Linear(2, 1))
    assert b"lucid" not in pickle.dumps(model)
    assert type(pickle.loads(pickle.dumps(model))[0]) is torch.nn.Linear


def test_compile_sees_through_our_names() -> None:
    """A compiled function may use ``lucid.nn.functional`` and ``lucid``'s dtypes without a graph break."""

    @torch.compile(fullgraph=True, backend="eager")
    def halved(x: torch.Tensor) -> torch.Tensor:
        return lucid.nn.functional.relu(lucid.sub(x, 1)).to(lucid.float16)

    assert halved(torch.tensor([0.0, 3.0])).tolist() == [0, 2]


# What is ours


def test_our_own_names_are_ours() -> None:
    """The rooms, the two classes and the version are not torch's, by whichever import."""
    from lucid import GradScaler, amp, autocast, nn, optim

    assert (amp, nn, optim) == tuple(sys.modules[f"lucid.{room}"] for room in ("amp", "nn", "optim"))
    assert GradScaler is lucid.GradScaler is amp.GradScaler is not torch.GradScaler
    assert autocast is lucid.autocast is amp.autocast is not torch.autocast
    assert lucid.__version__ != torch.__version__


def test_the_version_is_that_of_the_distribution() -> None:
    """What the package says is what pip would say."""
    metadata = pathlib.Path(__file__).parent.parent / "pyproject.toml"
    if metadata.exists():
        written = re.search(r'^version = "(.+)"$', metadata.read_text(), re.MULTILINE)
        assert written is not None
        assert lucid.__version__ == written[1]
    else:
        assert lucid.__version__ == importlib.metadata.version("lucid-amp")


@pytest.mark.parametrize("name", ["nothing", "_C", "__path_hooks__", "_dynamo", "__wrapped__", "Metal"])
@pytest.mark.parametrize("module", [lucid, lucid.nn, lucid.optim], ids=lambda module: module.__name__)
def test_underscore_names_and_names_that_torch_lacks_are_not_there(module: types.ModuleType, name: str) -> None:
    """They raise AttributeError, also those that torch has."""
    with pytest.raises(AttributeError, match=f"^module '{module.__name__}' has no attribute '{name}'$"):
        getattr(module, name)


def test_no_name_of_a_missing_creation_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation function that an older torch lacks is not there either, and its absence teaches nothing."""
    monkeypatch.delattr(torch, "empty_permuted")
    monkeypatch.setattr(_metal, "teach", lambda: pytest.fail("taught"))
    with pytest.raises(AttributeError, match="empty_permuted"):
        _ = lucid.empty_permuted


# What teaches

WATCHING = """
import json, sys, torch
import torch.nn as nn

PLACES = [torch, torch.Tensor, torch.Tensor.__base__, nn, nn.Module, nn.Parameter, torch.optim, torch.amp,
          torch.optim.Optimizer, torch.autocast, torch.device, torch.dtype, torch.overrides, torch.serialization]

def state():
    return [{name: id(value) for name, value in vars(place).items()} for place in PLACES]

ORIGINAL = nn.Module.to
untouched, hooks = state(), list(sys.meta_path)

def forget():
    if "to" in vars(torch.Tensor):
        del torch.Tensor.to
    nn.Module.to = ORIGINAL
    for name in [name for name in sys.modules if name.partition(".")[0] == "lucid"]:
        del sys.modules[name]

def taught(code):
    forget()
    exec(code, {})
    both = {type(vars(owner).get("to")).__name__ == "To" for owner in (torch.Tensor, nn.Module)}
    assert len(both) == 1, f"half taught by {code}"
    return both.pop()

def changes(code):
    forget()
    exec(code, {})
    now = state()
    return [f"{place.__name__}.{name}" for place, old, new in zip(PLACES, untouched, now)
            for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
"""

SILENT = [
    "import lucid",
    "import lucid.amp",
    "from lucid import amp",
    "from lucid.amp import GradScaler, autocast, ScaleUpdate",
    "import lucid; lucid.amp",
    "import lucid; lucid.GradScaler; lucid.autocast",
    "import lucid; lucid.float16; lucid.bfloat16",
    "import lucid; lucid.Tensor; lucid.Size; lucid.matmul; lucid.save; lucid.cuda",
    "import lucid; dir(lucid)",
    "import lucid; hasattr(lucid, '_C'); hasattr(lucid, 'nothing')",
    "import lucid; lucid.__version__",
    "import lucid._metal; lucid._metal.real_device('cpu'); lucid._metal.device_type('cuda')",
    "import torch, lucid.amp\nwith lucid.amp.autocast('cpu'): torch.ones(2, 2).mm(torch.ones(2, 2))",
]
TEACHING = [
    "import lucid.nn",
    "import lucid.optim",
    "from lucid import nn",
    "import lucid; lucid.optim",
    "from lucid.nn.utils import clip_grad_norm_",
    "from lucid.optim.lr_scheduler import StepLR",
    "import lucid; lucid.randn",
    "from lucid import zeros_like",
    "import lucid; lucid.device",
    "import lucid; lucid.load",
    "import lucid; hasattr(lucid, 'ones')",
]


@pytest.fixture(scope="module")
def watched() -> dict[str, Any]:
    """What a fresh process sees, for each program: which attributes of PyTorch changed, and who was taught."""
    program = f"""
{WATCHING}
print(json.dumps({{
    "changes": {{code: changes(code) for code in {SILENT!r}}},
    "finders": sys.meta_path == hooks,
    "noticed": changes("import lucid.nn") + changes("import torch; torch.amp.extra = 1"),
    "taught": {{code: taught(code) for code in {SILENT + TEACHING!r}}},
}}))"""
    return json.loads(in_a_fresh_process(program, "-W", "ignore"))


def test_importing_amp_changes_nothing_in_pytorch(watched: dict[str, Any]) -> None:
    """No attribute of torch, its tensors, modules, optimizers or tables is another object than before."""
    assert watched["changes"] == {code: [] for code in SILENT}
    assert watched["finders"] is True


def test_the_watch_would_notice(watched: dict[str, Any]) -> None:
    """The same look at PyTorch sees what importing ``lucid.nn`` teaches, and a name put into torch."""
    assert sorted(watched["noticed"]) == ["Module.to", "Tensor.to", "torch.amp.extra"]


def test_only_rooms_and_what_understands_the_name_teach(watched: dict[str, Any]) -> None:
    """Importing ``lucid.nn`` or ``lucid.optim``, or looking up a creation function, ``device`` or ``load``."""
    assert watched["taught"] == dict.fromkeys(SILENT, False) | dict.fromkeys(TEACHING, True)


@pytest.mark.parametrize("name", sorted(name for name in _metal.TAUGHT if hasattr(torch, name)))
def test_looking_up_what_understands_the_name_teaches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each name in the table, at its look-up."""
    taught: list[str] = []
    monkeypatch.setattr(_metal, "teach", lambda: taught.append(name))
    look_up: Callable[..., Any] = getattr(lucid, name)
    assert callable(look_up)
    assert taught == [name]
