"""``torch.nn.intrinsic.qat.modules.conv_fused`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.qat.modules.conv_fused import *
