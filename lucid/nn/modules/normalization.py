"""``torch.nn.modules.normalization`` to a type checker; to an import, that module itself."""

from torch.nn.modules.normalization import *
