"""``torch.nn.intrinsic.modules.fused`` to a type checker; to an import, that module itself."""

from torch.nn.intrinsic.modules.fused import *
