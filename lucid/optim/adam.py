"""``torch.optim.adam`` to a type checker; to an import, that module itself."""

from torch.optim.adam import *
