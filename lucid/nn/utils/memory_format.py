"""``torch.nn.utils.memory_format`` to a type checker; to an import, that module itself."""

from torch.nn.utils.memory_format import *
