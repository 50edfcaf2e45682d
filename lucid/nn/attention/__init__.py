"""``torch.nn.attention`` to a type checker; to an import, that module itself."""

from torch.nn.attention import *
