"""``torch.optim.sgd`` to a type checker; to an import, that module itself."""

from torch.optim.sgd import *
