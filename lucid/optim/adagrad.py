"""``torch.optim.adagrad`` to a type checker; to an import, that module itself."""

from torch.optim.adagrad import *
