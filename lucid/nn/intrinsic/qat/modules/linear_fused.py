"""``torch.nn.intrinsic.qat.modules.linear_fused`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.qat.modules.linear_fused import *
