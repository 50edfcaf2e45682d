"""``torch.nn.utils.prune`` to a type checker; to an import, that module itself."""

from torch.nn.utils.prune import *
