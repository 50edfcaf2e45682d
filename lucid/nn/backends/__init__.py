"""``torch.nn.backends`` to a type checker; to an import, that module itself."""

from torch.nn.backends import *
