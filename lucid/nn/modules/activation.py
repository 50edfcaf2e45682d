"""``torch.nn.modules.activation`` to a type checker; to an import, that module itself."""

from torch.nn.modules.activation import *
