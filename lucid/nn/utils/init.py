"""``torch.nn.utils.init`` to a type checker; to an import, that module itself."""

from torch.nn.utils.init import *
