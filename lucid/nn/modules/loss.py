"""``torch.nn.modules.loss`` to a type checker; to an import, that module itself."""

from torch.nn.modules.loss import *
