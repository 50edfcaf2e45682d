"""``torch.nn.qat.dynamic.modules`` to a type checker; to an import, that module itself."""

from torch.nn.qat.dynamic.modules import *
