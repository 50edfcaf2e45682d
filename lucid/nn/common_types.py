"""``torch.nn.common_types`` to a type checker; to an import, that module itself."""

from torch.nn.common_types import *
