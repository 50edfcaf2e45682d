"""``torch.nn.modules.padding`` to a type checker; to an import, that module itself."""

from torch.nn.modules.padding import *
