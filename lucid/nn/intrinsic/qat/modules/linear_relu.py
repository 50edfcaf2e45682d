"""``torch.nn.intrinsic.qat.modules.linear_relu`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.qat.modules.linear_relu import *
