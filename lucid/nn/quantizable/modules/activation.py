"""``torch.nn.quantizable.modules.activation`` to a type checker; to an import, that module itself."""

from torch.nn.quantizable.modules.activation import *
