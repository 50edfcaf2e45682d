"""``torch.nn.qat.modules.conv`` to a type checker; to an import, that module itself."""

from torch.nn.qat.modules.conv import *
