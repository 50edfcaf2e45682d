"""``torch.nn.modules.fold`` to a type checker; to an import, that module itself."""

from torch.nn.modules.fold import *
