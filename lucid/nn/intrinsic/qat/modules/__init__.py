"""``torch.nn.intrinsic.qat.modules`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.qat.modules import *
