"""``torch.nn.attention.experimental`` to a type checker; to an import, that module itself."""

from torch.nn.attention.experimental import *
