"""``torch.optim.nadam`` to a type checker; to an import, that module itself."""

from torch.optim.nadam import *
