"""``torch.nn.qat.modules`` to a type checker; to an import, that module itself."""

from torch.nn.qat.modules import *
