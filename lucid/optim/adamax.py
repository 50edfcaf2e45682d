"""``torch.optim.adamax`` to a type checker; to an import, that module itself."""

from torch.optim.adamax import *
