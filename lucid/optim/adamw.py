"""``torch.optim.adamw`` to a type checker; to an import, that module itself."""

from torch.optim.adamw import *
