"""``torch.nn.modules.distance`` to a type checker; to an import, that module itself."""

from torch.nn.modules.distance import *
