"""Hiding PyTorch's private names from the one module that uses them."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import hidden
import pytest
import torch


def run_hidden(source: str, folder: Path) -> ModuleType:
    """A module run as ``lucid.amp._torch`` is under ``--public-torch``."""
    file = folder / "looking.py"
    file.write_text(source)
    spec = spec_from_file_location("looking", file, loader=hidden.PublicLoader("looking", str(file)))
    assert spec is not None
    module = module_from_spec(spec)
    hidden.PublicLoader("looking", str(file)).exec_module(module)
    return module


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_mul_",
        "import torch\ngetattr(torch, '_foreach_mul_')",
        "import torch as t\ngetattr(t.optim.lr_scheduler, '_enable_get_lr_call')",
        "import torch._utils",
        "from torch import _utils",
        "from torch.utils import _pytree",
        "def f():\n    from torch._utils import _flatten_dense_tensors\nf()",
    ],
)
def test_a_private_name_is_not_there(source: str, tmp_path: Path) -> None:
    """However it is reached, a private name is missing, also inside a function."""
    with pytest.raises((AttributeError, ImportError)):
        run_hidden(source, tmp_path)


def test_a_default_and_a_question_get_the_answer_of_a_torch_without_it(tmp_path: Path) -> None:
    """``getattr`` with a default gives the default, ``hasattr`` says no, also on an optimizer."""
    module = run_hidden(
        "import torch\n"
        "optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)\n"
        "optimizer._mark = 1\n"
        "seen = getattr(torch, '_foreach_mul_', None), hasattr(torch, '_C'), getattr(optimizer, '_mark', 3)\n",
        tmp_path,
    )
    assert module.seen == (None, False, 3)


def test_public_names_are_the_very_objects(tmp_path: Path) -> None:
    """What is public is torch's own, and torch itself keeps its private names."""
    module = run_hidden("import torch\nfrom torch import Tensor\nmul = torch.mul\n", tmp_path)
    assert (module.Tensor, module.mul) == (torch.Tensor, torch.mul)
    assert hasattr(torch, "_foreach_mul_")


def test_it_refuses_to_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the module is loaded its names cannot be hidden, and nobody is to believe that they are."""
    monkeypatch.setitem(sys.modules, hidden.MODULE, ModuleType(hidden.MODULE))
    with pytest.raises(RuntimeError, match="imported already"):
        hidden.hide()


def test_the_option_hides_them(request: pytest.FixtureRequest) -> None:
    """The package's module sees no private name under ``--public-torch``, and sees them without it."""
    from lucid.amp import _torch

    asked = request.config.getoption("--public-torch")
    assert isinstance(vars(_torch)["torch"], hidden.PublicModule) is asked
