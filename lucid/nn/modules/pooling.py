"""``torch.nn.modules.pooling`` to a type checker; to an import, that module itself."""

from torch.nn.modules.pooling import *
