"""``torch.optim.radam`` to a type checker; to an import, that module itself."""

from torch.optim.radam import *
