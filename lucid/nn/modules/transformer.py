"""``torch.nn.modules.transformer`` to a type checker; to an import, that module itself."""

from torch.nn.modules.transformer import *
