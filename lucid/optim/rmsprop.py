"""``torch.optim.rmsprop`` to a type checker; to an import, that module itself."""

from torch.optim.rmsprop import *
