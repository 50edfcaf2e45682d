"""``torch.optim.adadelta`` to a type checker; to an import, that module itself."""

from torch.optim.adadelta import *
