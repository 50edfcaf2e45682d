"""``torch.nn.init`` to a type checker; to an import, that module itself."""

from torch.nn.init import *
