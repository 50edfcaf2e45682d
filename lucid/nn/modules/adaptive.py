"""``torch.nn.modules.adaptive`` to a type checker; to an import, that module itself."""

from torch.nn.modules.adaptive import *
