"""``torch.optim.sparse_adam`` to a type checker; to an import, that module itself."""

from torch.optim.sparse_adam import *
