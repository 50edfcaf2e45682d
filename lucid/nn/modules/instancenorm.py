"""``torch.nn.modules.instancenorm`` to a type checker; to an import, that module itself."""

from torch.nn.modules.instancenorm import *
