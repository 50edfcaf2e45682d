"""``torch.nn.utils.stateless`` to a type checker; to an import, that module itself."""

from torch.nn.utils.stateless import *
