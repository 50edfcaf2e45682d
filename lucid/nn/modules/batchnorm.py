"""``torch.nn.modules.batchnorm`` to a type checker; to an import, that module itself."""

from torch.nn.modules.batchnorm import *
