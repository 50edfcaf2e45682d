"""``torch.optim.asgd`` to a type checker; to an import, that module itself."""

from torch.optim.asgd import *
