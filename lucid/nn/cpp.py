"""``torch.nn.cpp`` to a type checker; to an import, that module itself."""

from torch.nn.cpp import *
