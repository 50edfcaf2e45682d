"""``torch.optim.rprop`` to a type checker; to an import, that module itself."""

from torch.optim.rprop import *
