"""``torch.nn.quantizable.modules`` to a type checker; to an import, that module itself."""

from torch.nn.quantizable.modules import *
