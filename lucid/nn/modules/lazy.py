"""``torch.nn.modules.lazy`` to a type checker; to an import, that module itself."""

from torch.nn.modules.lazy import *
