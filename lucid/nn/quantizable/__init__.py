"""``torch.nn.quantizable`` to a type checker; to an import, that module itself."""

from torch.nn.quantizable import *
