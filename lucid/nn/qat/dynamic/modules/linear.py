"""``torch.nn.qat.dynamic.modules.linear`` to a type checker; to an import, that module itself."""

from torch.nn.qat.dynamic.modules.linear import *
