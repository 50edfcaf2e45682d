"""``torch.nn`` under the specification's name: the same objects and submodules, nothing copied.

Knows no module of its own. Importing it teaches ``.to("metal")``, and changes nothing else in PyTorch.
"""

from typing import TYPE_CHECKING

from lucid import _metal

_metal.teach()

if TYPE_CHECKING:
    from torch.nn import *
    from torch.nn import functional as functional
else:
    from lucid._alias import alias

    __getattr__, __dir__, __all__, __path__ = alias(__name__)
