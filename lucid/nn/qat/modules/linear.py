"""``torch.nn.qat.modules.linear`` to a type checker; to an import, that module itself."""

from torch.nn.qat.modules.linear import *
