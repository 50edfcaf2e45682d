"""``torch.nn.parameter`` to a type checker; to an import, that module itself."""

from torch.nn.parameter import *
